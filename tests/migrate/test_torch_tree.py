"""Code that nobody here wrote: torch's own files, as input to scan and rewrite; nothing is written."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

import pytest

from torchq_compat.migrate.documents import read_document
from torchq_compat.migrate.rewriter import rewrite_text
from torchq_compat.migrate.scanner import Scan, scan_paths

SPEC = find_spec("torch")
assert SPEC is not None
assert SPEC.origin is not None
TORCH = Path(SPEC.origin).parent
#: FX itself and what uses it, and a folder that has nothing to do with it.
SLICE = (
    "ao/quantization/fx/lstm_utils.py",
    "ao/quantization/quantize_fx.py",
    "ao/ns/fx",
    "nn/modules",
    "optim",
)


def check(scan: Scan, may_change: Iterable[str]) -> None:
    changed = set()
    for document, origin in scan.documents:
        text = rewrite_text(document.text, origin=origin)
        ast.parse(text)
        assert rewrite_text(text, origin=origin) == text
        if text != document.text:
            changed.add(document.path.relative_to(TORCH).as_posix())
    announced = {f.path.relative_to(TORCH).as_posix() for f in scan.findings if f.site.edits}
    assert changed == announced
    assert changed == set(may_change)


def test_a_slice_of_the_tree() -> None:
    scan = scan_paths([TORCH / name for name in SLICE])
    assert scan.problems == []
    check(scan, {"ao/quantization/fx/lstm_utils.py", "ao/ns/fx/n_shadows_utils.py"})


def test_files_without_fx_are_left_alone() -> None:
    """Without the quick look at the text: every one is parsed and goes through all rewrites."""
    paths = sorted((TORCH / "nn" / "modules").glob("*.py"))[::4]
    assert paths
    for path in paths:
        document = read_document(path)
        assert rewrite_text(document.text) == document.text, path


@pytest.mark.slow
def test_the_whole_tree() -> None:
    scan = scan_paths([TORCH])
    assert scan.files > 2000
    # What this Python cannot parse, written for a later one.
    assert all("py3" in problem.path.name for problem in scan.problems)
    check(
        scan,
        {
            "ao/ns/_numeric_suite_fx.py",
            "ao/ns/fx/n_shadows_utils.py",
            "ao/quantization/fx/convert.py",
            "ao/quantization/fx/lstm_utils.py",
            "quantization/quantize_fx.py",
            "testing/_internal/common_quantization.py",
        },
    )
