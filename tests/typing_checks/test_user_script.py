"""A user's script over the public API passes mypy strict, and a typo does not."""

from __future__ import annotations

import inspect
import os
import pydoc
import subprocess
import sys
from pathlib import Path

import pytest

import torchq_compat as tc

ROOT = Path(tc.__file__).parents[1]
SCRIPT = Path(__file__).with_name("user_script.py")
TYPOS = """
import torchq_compat as tc
tc.prepare_fxx
from torchq_compat import convert_fxx
def f(m: tc.ConvertedModel) -> None:
    tc.export(m)
    tc.export(m, (), recurrent="rolld")
"""


def checked(*command: str, path: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    return subprocess.run(
        [*command, str(path)], cwd=path.parent, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_mypy(tmp_path: Path) -> None:
    script, typos = tmp_path / "user_script.py", tmp_path / "typos.py"
    script.write_text(SCRIPT.read_text())
    typos.write_text(TYPOS)
    mypy = (sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent")
    good = checked(*mypy, path=script)
    assert good.returncode == 0, good.stdout + good.stderr
    told = checked(*mypy, path=typos).stdout
    for line, what in ((3, "attr-defined"), (4, "attr-defined"), (6, "call-arg"), (7, "arg-type")):
        assert any(f"typos.py:{line}:" in each and what in each for each in told.splitlines()), told


def test_help_and_completion_show_what_is_public() -> None:
    assert {"prepare_fx", "nn", "profiles", "checkpoints", "__version__"} <= set(dir(tc))
    assert {"annotate", "pipeline", "lower", "support", "sys", "Any"}.isdisjoint(dir(tc))
    for name in dir(tc):
        assert getattr(tc, name) is not None
    shown = pydoc.plain(pydoc.TextDoc().docmodule(tc))
    modules = shown.partition("SUBMODULES")[2].partition("CLASSES")[0].split()
    assert modules == sorted(name for name in dir(tc) if inspect.ismodule(getattr(tc, name)))
    assert "profiles" in modules
    assert "PACKAGE CONTENTS" not in shown


def test_signatures_say_what_is_required() -> None:
    for function in (tc.prepare_fx, tc.prepare_qat_fx, tc.export, tc.to_onnx, tc.to_executorch):
        parameter = inspect.signature(function).parameters["example_inputs"]
        assert parameter.default is inspect.Parameter.empty
