"""A torch without the FX engine, for child processes: only what torchao imports of it is found."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

__all__ = ["HIDDEN", "environment_without_engine", "hide"]

ROOT = Path(__file__).parents[2]
ENGINE = "torch.ao.quantization.fx"
#: All but what torchao 0.18 imports: custom_config, prepare and what those import.
HIDDEN = (
    "torch.ao.quantization.quantize_fx",
    "torch.quantization.quantize_fx",
    "torch.quantization.fx",
    "torch.ao.ns._numeric_suite_fx",
    *(
        f"{ENGINE}.{name}"
        for name in (
            "_model_report",
            "convert",
            "fuse",
            "fuse_handler",
            "lower_to_qnnpack",
            "lstm_utils",
            "tracer",
        )
    ),
)


class _Hiding(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.startswith(HIDDEN) and any(f"{fullname}.".startswith(f"{name}.") for name in HIDDEN):
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        if fullname != ENGINE:
            return None
        # The package without its own file, which imports what is hidden.
        found = PathFinder.find_spec(fullname, path)
        assert found is not None
        bare = ModuleSpec(fullname, None, is_package=True)
        bare.submodule_search_locations = found.submodule_search_locations
        return bare


def hide() -> None:
    """Hide the engine from every import of this process that is still to come."""
    assert not [name for name in sys.modules if name.startswith(HIDDEN)]
    sys.meta_path.insert(0, _Hiding())


def environment_without_engine(folder: Path) -> dict[str, str]:
    """Return the variables of a Python process, and of its children, that find no engine; writes a file."""
    (folder / "sitecustomize.py").write_text("from tests.helpers.hidden_engine import hide\n\nhide()\n")
    path = os.pathsep.join((str(folder), str(ROOT)))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
