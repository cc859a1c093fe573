"""The code of a lowered graph as it runs: the same lines, with operators called without their Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph
from torch.fx.graph import PythonCode

from torchq_compat.support.upstream import OpOverload, forward_from_src

__all__ = ["direct_forward"]

#: What the name of an operator begins with in the code.
NAME = "_torchq_compat_operator_"


def direct_forward(code: PythonCode, graph: Graph) -> Callable[..., Any]:
    """Return ``forward`` of ``code``, which was generated for ``graph``.

    Of an operator that takes packed weights the overload looks at all of its arguments in Python, for classes
    of torch.compile's own, which a lowered graph is never given. Below it torch asks the packed weights for
    ``__torch_function__``, which throws and catches an exception of C++ (``check_has_torch_function``, torch
    2.13). Each takes longer than a small kernel.
    """
    source, names, prefix = code.src, dict(code.globals), NAME
    while prefix in source:
        prefix += "_"
    overloads = {str(node.target): node.target for node in graph.nodes if isinstance(node.target, OpOverload)}
    for index, (name, overload) in enumerate(sorted(overloads.items())):
        source = source.replace(f"torch.ops.{name}(", f"{prefix}{index}(")
        names[f"{prefix}{index}"] = _of_packed(overload._op) if _takes_packed(overload) else overload._op
    forward: Callable[..., Any] = forward_from_src(source, names)
    return forward


def _takes_packed(overload: OpOverload) -> bool:
    return any(argument.type.kind() == "ClassType" for argument in overload._schema.arguments)


def _of_packed(operator: Callable[..., Any]) -> Callable[..., Any]:
    """``operator`` for tensors that have no ``__torch_function__``: quantized ones have none."""

    def call(*args: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return operator(*args)

    return call
