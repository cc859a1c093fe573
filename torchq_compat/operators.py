"""Register the operators that exported programs call. Import this module before loading a saved program:

import torchq_compat.operators
program = torch.export.load("model.pt2")

A C++ program loads the library that ``native_library`` returns instead.
"""

from pathlib import Path

# These imports register quantized_decomposed and torchq_compat_native.
import torchao.quantization.pt2e  # noqa: F401

import torchq_compat.lower.integers.operators
import torchq_compat.recurrent.kernel.op  # noqa: F401
from torchq_compat.errors import ExportError
from torchq_compat.recurrent.kernel.build import kernel_build

__all__ = ["native_library"]


def native_library() -> Path:
    """Return the path of the shared library with the operators of ``torchq_compat_native``.

    These are the operators of converted models. A C++ program that runs an AOTInductor package, or
    TorchScript, of such a model opens the library (``dlopen``) before it loads the model. The library needs
    libtorch 2.13 or later and no Python; it chooses its instructions for the CPU it runs on.

    Returns:
        The path on this machine; ship the file beside the package.

    Raises:
        ExportError: the library is missing and cannot be compiled here.

    Example:
        >>> from torchq_compat.operators import native_library
        >>> native_library().suffix
        '.so'
    """
    build = kernel_build()
    if build.library is None:
        raise ExportError.of("TQ930.library", problem=build.problem, hint=build.hint)
    return build.library
