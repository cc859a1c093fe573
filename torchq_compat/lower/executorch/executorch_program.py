"""An ExecuTorch program: the bytes of a ``.pte`` file, and the signature of its inputs and results."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from torchq_compat.errors import ExecutorchError
from torchq_compat.lower.executorch.delegation import DelegationReport
from torchq_compat.lower.executorch.inputs import InputSpec
from torchq_compat.lower.executorch.runtime import runtime
from torchq_compat.support.argument_checks import PATH, checked_arguments
from torchq_compat.support.atomic_files import whole_file
from torchq_compat.support.upstream import pytree

__all__ = ["ExecutorchProgram"]

METHOD = "forward"


@dataclass(frozen=True)
class ExecutorchProgram:
    """A program made by ``to_executorch``; calling it with the model's arguments runs ExecuTorch's runtime.

    Attributes:
        pte: the content of a ``.pte`` file.
        inputs: the flat inputs, with the sizes they may have.
        report: which operators a backend took and which the portable kernels run; None for a program that was
            read from a file.
        structure: the structure of the results; None for a program that was read from a file, which returns a
            flat tuple.
    """

    pte: bytes = field(repr=False)
    inputs: tuple[InputSpec, ...]
    report: DelegationReport | None = None
    structure: pytree.TreeSpec | None = field(default=None, repr=False)

    @classmethod
    @checked_arguments(path=PATH)
    def read(cls, path: str | os.PathLike[str]) -> Self:
        """Return the program in a ``.pte`` file. The file states only the largest sizes of its inputs.

        Raises:
            ExecutorchError: the file is no program that the runtime can load, or the extra is not installed.
        """
        pte = Path(path).read_bytes()
        try:
            meta = runtime().load_program(pte).metadata(METHOD)
        except RuntimeError as cause:
            raise _unreadable(Path(path).name, cause) from cause
        tensors = (meta.input_tensor_meta(index) for index in range(meta.num_inputs()))
        return cls(pte, tuple(InputSpec.up_to(tuple(tensor.sizes())) for tensor in tensors))

    def load(self) -> None:
        """Load the program into the runtime of this process; otherwise, the first call does so.

        Raises:
            ExecutorchError: the runtime refuses the program, or the extra is not installed.
        """
        try:
            self._method  # noqa: B018
        except RuntimeError as cause:
            raise _unreadable("the program", cause) from cause

    @checked_arguments(path=PATH)
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the ``.pte`` file, whole or not at all.

        Raises:
            OSError: the file cannot be written; an existing file is left unchanged.
        """
        with whole_file(Path(path)) as file:
            file.write(self.pte)

    def __call__(self, *args: Any) -> Any:
        """Run with positional ``args``, nested like the model's.

        Raises:
            ExecutorchError: the number of inputs, a dtype or a size differs from those of the program, or the
                runtime stops with an error.
        """
        leaves = [self._as_input(leaf) for leaf in pytree.tree_leaves(args)]
        if len(leaves) != len(self.inputs):
            expected = [str(each) for each in self.inputs]
            raise ExecutorchError.other_inputs(f"{len(leaves)} inputs were given", expected)
        for index, (leaf, spec) in enumerate(zip(leaves, self.inputs, strict=True)):
            spec.check(index, leaf)
        self.load()
        try:
            results = tuple(self._method.execute(leaves))
        except RuntimeError as cause:
            raise ExecutorchError(
                f"ExecuTorch's runtime stopped: {cause}",
                hint="the lines printed before this error name the instruction; sizes that the model fixes "
                "must be those of example_inputs.",
            ) from cause
        return results if self.structure is None else pytree.tree_unflatten(results, self.structure)

    @cached_property
    def _method(self) -> Any:
        return runtime().load_program(self.pte).load_method(METHOD)

    @staticmethod
    def _as_input(leaf: Any) -> Any:
        # The runtime reads memory in the order of the dimensions, without strides.
        return leaf.detach().contiguous() if isinstance(leaf, Tensor) else leaf


def _unreadable(name: str, cause: BaseException) -> ExecutorchError:
    return ExecutorchError(
        f"{name} is no ExecuTorch program this runtime can load: {cause}",
        hint="write it with to_executorch(..., path=...) and the same version of executorch.",
    )
