"""Code written elsewhere: all of torch and torchao as input to scan and rewrite; nothing is written."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

import pytest

from torchq_compat.port.scanner import Scan, rewrite_text, scan_paths
from torchq_compat.port.source.files import read_document


def folder_of(package: str) -> Path:
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


TORCH, TORCHAO = folder_of("torch"), folder_of("torchao")
#: FX itself and its users, and a folder without FX.
SLICE = (
    "ao/quantization/fx/lstm_utils.py",
    "ao/quantization/quantize_fx.py",
    "ao/ns/fx",
    "nn/modules",
    "optim",
)


def check(scan: Scan, root: Path, must_change: Iterable[str]) -> None:
    """Assert that results parse and are final, and that exactly ``must_change`` changes, as announced."""
    changed = set()
    for document, origin in scan.documents:
        text = rewrite_text(document.text, origin=origin)
        ast.parse(text)
        assert rewrite_text(text, origin=origin) == text
        if text != document.text:
            changed.add(document.path.relative_to(root).as_posix())
    announced = {f.path.relative_to(root).as_posix() for f in scan.findings if f.site.edits}
    assert changed == announced
    assert changed == set(must_change)


@pytest.mark.slow
def test_a_slice_of_the_tree() -> None:
    scan = scan_paths([TORCH / name for name in SLICE])
    assert scan.problems == []
    check(scan, TORCH, {"ao/quantization/fx/lstm_utils.py", "ao/ns/fx/n_shadows_utils.py"})


@pytest.mark.slow
def test_torchao() -> None:
    scan = scan_paths([TORCHAO])
    assert scan.problems == []
    pt2e = "quantization/pt2e"
    files = (f"{pt2e}/convert.py", f"{pt2e}/prepare.py", f"{pt2e}/quantize_pt2e.py", "testing/pt2e/utils.py")
    check(scan, TORCHAO, {*files, "sparsity/wanda.py"})  # it calls eager mode's prepare


def test_files_without_fx_are_left_alone() -> None:
    """Without the quick check of the text: every file is parsed and goes through all rewrites."""
    paths = sorted((TORCH / "nn" / "modules").glob("*.py"))[::4]
    assert paths
    for path in paths:
        document = read_document(path)
        assert rewrite_text(document.text) == document.text, path


@pytest.mark.slow
def test_the_whole_tree() -> None:
    scan = scan_paths([TORCH])
    assert scan.files > 2000
    # Files written for a later Python, which this one cannot parse.
    assert all("py3" in problem.path.name for problem in scan.problems)
    check(
        scan,
        TORCH,
        {
            "ao/ns/_numeric_suite_fx.py",
            "ao/ns/fx/n_shadows_utils.py",
            "ao/quantization/fx/convert.py",
            "ao/quantization/fx/lstm_utils.py",
            "quantization/quantize.py",
            "quantization/quantize_fx.py",
            "testing/_internal/common_quantization.py",
        },
    )
