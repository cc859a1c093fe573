"""A torch without the FX engine, for child processes: only what torchao imports of the engine is found."""

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
#: What torchao 0.18 imports of the engine and of the numeric suite, with the imports of that.
KEPT = {
    ENGINE,
    "torch.ao.ns",
    "torch.ao.ns.fx",
    "torch.ao.ns.fx.ns_types",
    "torch.ao.ns.fx.utils",
    *(
        f"{ENGINE}.{name}"
        for name in (
            "_decomposed",
            "_equalize",
            "_lower_to_native_backend",
            "custom_config",
            "graph_module",
            "lower_to_fbgemm",
            "match_utils",
            "pattern_utils",
            "prepare",
            "qconfig_mapping_utils",
            "quantize_handler",
            "utils",
        )
    ),
}
#: Hidden are these modules and all that is below them, but what is kept.
HIDDEN = (
    "torch.ao.quantization.quantize_fx",
    "torch.quantization.quantize_fx",
    "torch.quantization.fx",
    ENGINE,
    "torch.ao.ns",
    "torch.ao.pruning",
    "torch.ao.quantization._equalize",
    "torch.ao.quantization._correct_bias",
)


def _is_hidden(name: str) -> bool:
    return name not in KEPT and any(name == each or name.startswith(f"{each}.") for each in HIDDEN)


class _Hiding(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if _is_hidden(fullname):
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        if fullname != ENGINE:
            return None
        # The package without its own ``__init__``, which imports hidden modules.
        found = PathFinder.find_spec(fullname, path)
        assert found is not None
        bare = ModuleSpec(fullname, None, is_package=True)
        bare.submodule_search_locations = found.submodule_search_locations
        return bare


def hide() -> None:
    """Hide the engine from all later imports of this process."""
    assert not [name for name in sys.modules if _is_hidden(name)]
    sys.meta_path.insert(0, _Hiding())


def environment_without_engine(folder: Path) -> dict[str, str]:
    """Return an environment in which Python processes find no engine, after writing a file to ``folder``."""
    (folder / "sitecustomize.py").write_text("from tests.helpers.hidden_engine import hide\n\nhide()\n")
    path = os.pathsep.join((str(folder), str(ROOT)))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
