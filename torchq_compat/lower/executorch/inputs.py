"""The inputs of an ExecuTorch program, with their largest sizes, for which it plans its memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram
from torch.fx import Node

from torchq_compat.errors import ExecutorchError
from torchq_compat.sizes.input_sizes import Dimension
from torchq_compat.support.dtypes import dtype_name
from torchq_compat.support.upstream import pytree

__all__ = ["InputSpec", "bounded_by", "read_inputs", "unexpectedly_fixed"]


class SizeRange(NamedTuple):
    """The sizes a dimension may have, both ends included."""

    low: int
    high: int

    def __str__(self) -> str:
        return str(self.high) if self.low == self.high else f"{self.low}..{self.high}"


@dataclass(frozen=True)
class InputSpec:
    """A flat input. ``dtype`` is None if it is unknown, ``sizes`` is None if the input is no tensor."""

    name: str
    dtype: torch.dtype | None
    sizes: tuple[SizeRange, ...] | None

    @classmethod
    def up_to(cls, sizes: tuple[int, ...]) -> InputSpec:
        return cls("", None, tuple(SizeRange(0, size) for size in sizes))

    def check(self, index: int, value: Any) -> None:
        """Raise an ExecutorchError if ``value`` does not fit this input."""
        if self.sizes is None:
            return
        if not isinstance(value, Tensor) or value.dim() != len(self.sizes):
            found = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ExecutorchError.other_inputs(f"input {index} is {found}", [str(self)])
        if self.dtype is not None and value.dtype is not self.dtype:
            raise ExecutorchError.other_inputs(f"input {index} is {value.dtype}", [str(self)])
        for dimension, (size, allowed) in enumerate(zip(value.shape, self.sizes, strict=True)):
            if size > allowed.high and allowed.low != allowed.high:
                raise ExecutorchError(
                    f"input {index} has size {size} in dimension {dimension}, and the program was made for "
                    f"at most {allowed.high}.",
                    hint="call to_executorch with example_inputs as large as the largest input, or with "
                    "dynamic_shapes= whose Dims have a larger max.",
                )
            if not allowed.low <= size <= allowed.high:
                raise ExecutorchError.other_inputs(
                    f"input {index} has size {size} in dimension {dimension}", [str(self)]
                )

    def __str__(self) -> str:
        dtype = dtype_name(self.dtype) if self.dtype else "tensor"
        sizes = "" if self.sizes is None else f"[{', '.join(map(str, self.sizes))}]"
        return f"{self.name}: {dtype}{sizes}".removeprefix(": ")


def bounded_by(example_inputs: tuple[Any, ...]) -> Any:
    """Return ``dynamic_shapes`` with which every size that the model leaves free ranges from 1 to its value
    in ``example_inputs``."""

    def sizes(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return None
        return {i: Dim.AUTO(min=1, max=size) for i, size in enumerate(leaf.shape) if size > 1}

    return pytree.tree_map(sizes, example_inputs)


def read_inputs(program: ExportedProgram) -> tuple[InputSpec, ...]:
    """Return the flat inputs of ``program``.

    Raises:
        ExecutorchError: a free size without an upper bound.
    """
    nodes = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    return tuple(_input(nodes[str(name)]) for name in program.graph_signature.user_inputs)


def unexpectedly_fixed(inputs: tuple[InputSpec, ...], sizes: list[tuple[Dimension, ...]]) -> list[str]:
    """Return the sizes above 1 that ``inputs`` fix and that the converted model, whose inputs have ``sizes``,
    leaves free."""
    return [
        f"{spec.name} in dimension {dimension.index} to {high}"
        for spec, dimensions in zip(inputs, sizes, strict=True)
        for dimension, (low, high) in zip(dimensions, spec.sizes or (), strict=True)
        if not dimension.is_fixed and low == high > 1
    ]


def _input(placeholder: Node) -> InputSpec:
    value = placeholder.meta.get("val")
    if not isinstance(value, Tensor):
        return InputSpec(placeholder.name, None, None)
    ranges = tuple(_range(placeholder, i, size) for i, size in enumerate(value.shape))
    return InputSpec(placeholder.name, value.dtype, ranges)


def _range(placeholder: Node, dimension: int, size: int | torch.SymInt) -> SizeRange:
    if not _is_free(size):
        return SizeRange(int(size), int(size))
    assert isinstance(size, torch.SymInt)
    bounds = size.node.shape_env.bound_sympy(size.node.expr)
    if not bounds.upper.is_Integer:
        raise ExecutorchError(
            f"dimension {dimension} of input {placeholder.name!r} has no upper bound; ExecuTorch "
            "plans its memory before it runs.",
            hint="give its Dim a max=, or leave dynamic_shapes out: then the sizes of example_inputs are "
            "the largest.",
        )
    # torch.export assumes a free size to be at least 2, but such a program also runs with size 1.
    low = int(bounds.lower)
    return SizeRange(1 if low == 2 else low, int(bounds.upper))


def _is_free(size: int | torch.SymInt) -> bool:
    # A size that was free and then fixed is still a SymInt.
    return isinstance(size, torch.SymInt) and not size.node.expr.is_number
