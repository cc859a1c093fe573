"""The API reference, from the docstrings of what users import: python .ci/api_reference.py [FOLDER]."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pdoc

#: What users import; every other module is internal.
PUBLIC_MODULES = (
    "torchq_compat",
    "torchq_compat.checkpoints",
    "torchq_compat.custom_config",
    "torchq_compat.custom_modules",
    "torchq_compat.errors",
    "torchq_compat.lstm_utils",
    "torchq_compat.nn.quantizable",
    "torchq_compat.nn.quantized",
    "torchq_compat.operators",
    "torchq_compat.profiles",
    "torchq_compat.quantize_fx",
    "torchq_compat.recurrent_parts",
)


def main() -> None:
    """Write one page for each public module, and an index."""
    for name in PUBLIC_MODULES:
        module = import_module(name)
        for public in getattr(module, "__all__", ()):  # names that modules import on first use
            setattr(module, public, getattr(module, public))
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "build/api")
    pdoc.render.configure(docformat="google")
    pdoc.pdoc(*PUBLIC_MODULES, output_directory=folder)


if __name__ == "__main__":
    main()
