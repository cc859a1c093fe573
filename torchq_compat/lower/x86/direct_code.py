"""The code that a lowered graph runs: the generated lines, calling operators below their Python layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph
from torch.fx.graph import PythonCode

from torchq_compat.support.quantized_tensors import (
    DEQUANTIZE_FUNCTION,
    DEQUANTIZE_OP,
    QUANTIZE_FUNCTION,
    QUANTIZE_OP,
)
from torchq_compat.support.upstream import OpOverload, forward_from_src

__all__ = ["BY_FUNCTION", "direct_forward"]

ATEN = torch.ops.aten
#: Operators with a function of torch that has the same arguments in the same order: torch's generated
#: binding parses them in half the time.
BY_FUNCTION: dict[OpOverload, Callable[..., Any]] = {
    DEQUANTIZE_OP: DEQUANTIZE_FUNCTION,
    QUANTIZE_OP: QUANTIZE_FUNCTION,
    ATEN.transpose.int: torch.transpose,
    ATEN.permute.default: torch.permute,
    ATEN.select.int: torch.select,
    ATEN.reshape.default: torch.reshape,
    ATEN.flatten.using_ints: torch.flatten,
    ATEN.unsqueeze.default: torch.unsqueeze,
    ATEN.squeeze.dim: torch.squeeze,
    ATEN.softmax.int: torch.softmax,
    ATEN.stack.default: torch.stack,
    ATEN.relu.default: torch.relu,
}

#: The prefix of operator names in the code.
NAME = "_torchq_compat_operator_"


def direct_forward(code: PythonCode, graph: Graph) -> Callable[..., Any]:
    """Return ``forward`` of ``code``, which was generated for ``graph``.

    An overload with packed weights among its arguments inspects all of its arguments in Python, for classes
    of torch.compile, which a lowered graph is never given. Below the overload, torch asks the packed weights
    for ``__torch_function__``, which throws and catches a C++ exception (``check_has_torch_function``, torch
    2.13). Either takes longer than a small kernel.
    """
    source, names, prefix = code.src, dict(code.globals), NAME
    while prefix in source:
        prefix += "_"
    overloads = {str(node.target): node.target for node in graph.nodes if isinstance(node.target, OpOverload)}
    for index, (name, overload) in enumerate(sorted(overloads.items())):
        source = source.replace(f"torch.ops.{name}(", f"{prefix}{index}(")
        names[f"{prefix}{index}"] = _called_directly(overload)
    forward: Callable[..., Any] = forward_from_src(source, names)
    return forward


def _called_directly(overload: OpOverload) -> Callable[..., Any]:
    if _takes_packed(overload):
        return _of_packed(overload._op)
    operator: Callable[..., Any] = BY_FUNCTION.get(overload, overload._op)
    return operator


def _takes_packed(overload: OpOverload) -> bool:
    return any(argument.type.kind() == "ClassType" for argument in overload._schema.arguments)


def _of_packed(operator: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``operator`` for tensors without ``__torch_function__``, such as quantized tensors."""

    def call(*args: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return operator(*args)

    return call
