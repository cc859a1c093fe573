"""Register the operators that exported programs call. Import it where a saved program is loaded:

import torchq_compat.operators
program = torch.export.load("model.pt2")

A program without Python loads the library of ``native_library`` instead.
"""

from __future__ import annotations

from pathlib import Path

# Importing registers: quantized_decomposed, torchq_compat_native::recurrent, and
# torchq_compat::quantized_recurrent.
import torchao.quantization.pt2e  # noqa: F401

import torchq_compat.custom_modules.recurrent.exported_op.recurrent_op
import torchq_compat.custom_modules.recurrent.native.op  # noqa: F401
from torchq_compat.custom_modules.recurrent.native.build import kernel_build
from torchq_compat.errors import ExportError

__all__ = ["native_library"]


def native_library() -> Path:
    """Find the shared library with ``torchq_compat_native::recurrent``, the operator of recurrent modules.

    A program in C++ that runs an AOTInductor package of a model with recurrent modules opens it (``dlopen``)
    before it loads the model. It needs libtorch 2.13 or later, and nothing of Python; which instructions it
    uses, it asks the CPU it runs on.

    Returns:
        Where it is on this machine: to be shipped beside the package.

    Raises:
        ExportError: there is none, and none can be compiled here.

    Example:
        >>> from torchq_compat.operators import native_library
        >>> native_library().suffix
        '.so'
    """
    build = kernel_build()
    if build.library is None:
        raise ExportError(
            f"the library of recurrent modules could not be built: {build.problem}.",
            hint="install a C++ compiler with OpenMP, such as g++, or name one in CXX.",
        )
    return build.library
