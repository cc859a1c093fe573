"""An untested pair of torch and torchao is reported once; pyproject.toml has the tested pairs."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import torchq_compat
from torchq_compat.errors import QuantizationWarning
from torchq_compat.support import versions
from torchq_compat.support.versions import TESTED, is_tested

ROOT = Path(torchq_compat.__file__).parents[1]


@pytest.mark.parametrize("pair", TESTED)
def test_nothing_is_said_of_a_tested_pair(pair: tuple[str, str]) -> None:
    assert is_tested(f"{pair[0]}.1+cpu", f"{pair[1]}.0")


@pytest.mark.parametrize(
    "pair",
    [
        ("2.12.0", "0.18.0"),
        ("2.14.0", "0.17.0"),
        ("2.16.0.dev20270101", "0.18.0"),
        ("2.15.0", "0.19.0"),
        ("3", "1"),
    ],
)
def test_another_pair_is_not_tested(pair: tuple[str, str]) -> None:
    assert not is_tested(*pair)


def test_the_ranges_of_the_package_have_bounds_and_hold_the_tested_versions() -> None:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (bounds,) = (re.findall(r"torch>=2\.(\d+),<2\.(\d+)$", line) for line in dependencies if "torch>" in line)
    ((first, end),) = bounds
    assert all(int(first) <= int(torch.split(".")[1]) < int(end) for torch, _ in TESTED)
    assert {ao for _, ao in TESTED} == {"0.18"}
    assert "torchao>=0.18,<0.19" in dependencies


def test_the_warning_is_one_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions.torchao, "__version__", "0.99.0")
    with pytest.warns(
        QuantizationWarning, match=r"torchao 0\.99\.0 is a pair .*torch 2\.13 with torchao 0\.18"
    ):
        versions.warn_of_untested_pair()


@pytest.mark.slow
def test_it_is_said_once_where_the_package_is_imported(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torchao\n"
        "torchao.__version__ = '0.99.0'\n"
        "from torchq_compat import prepare_fx\n"
        "from torchq_compat import convert_fx, explain\n"
    )
    command = [sys.executable, str(script)]
    result = subprocess.run(
        command, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300, check=True
    )
    lines = [line for line in result.stderr.splitlines() if "not tested with" in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"{script}:3: QuantizationWarning: torch 2.")
