"""The answers of kernel families: a kernel call, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

from torchq_compat.qspecs.qparams import PerTensorQParams
from torchq_compat.support.upstream import OpOverload

__all__ = ["Constant", "Family", "Floats", "KernelCall", "Quantized", "Refusal", "Rule", "Site"]


@dataclass(frozen=True)
class Quantized:
    """An argument: the value of ``node`` as a quantized tensor."""

    node: Node


@dataclass(frozen=True)
class Floats:
    """An argument: the value of ``node`` in floats."""

    node: Node


@dataclass(frozen=True)
class Constant:
    """An argument: a value made at lowering, mostly packed weights."""

    value: Any


@dataclass(frozen=True)
class KernelCall:
    """A kernel that computes what an op and its q-dq compute.

    Attributes:
        args: its arguments; values of the graph are ``Quantized`` or ``Floats``, values made at
            lowering ``Constant``, results of other calls ``KernelCall``.
        covers: the nodes of the reference graph that it computes, beside the node whose value it returns.
        returns_floats: whether the result is floats; else it is a quantized tensor with the qparams of the
            site.
        stands_for: the node whose value a float result is; None for the op, or for the ReLU after it.
        name: shown to users in place of ``kernel``, if several kernels compute the result.
        note: shown to users after the name.
    """

    kernel: OpOverload
    args: tuple[Any, ...]
    covers: tuple[Node, ...] = ()
    returns_floats: bool = False
    stands_for: Node | None = None
    name: str = ""
    note: str = ""

    @property
    def label(self) -> str:
        return self.name or str(self.kernel)


@dataclass(frozen=True)
class Refusal:
    """Why an op has no kernel here; ``warn`` says whether the user would be misled without a warning."""

    reason: str
    warn: bool = False


@dataclass(frozen=True)
class Site:
    """An op of the reference graph for which a rule answers.

    Attributes:
        op: the op.
        relu: the ReLU after it, if nothing else reads the op.
        follower: the op after it that one kernel may compute along with it.
        qparams: the qparams its result is quantized with; None if the result stays float.
        qparams_of: returns the qparams of a node's values, or None.
    """

    graph_module: GraphModule
    op: Node
    relu: Node | None
    qparams: PerTensorQParams | None
    qparams_of: Callable[[Any], PerTensorQParams | None]
    follower: Node | None = None

    @property
    def covered(self) -> tuple[Node, ...]:
        return tuple(node for node in (self.op, self.follower, self.relu) if node is not None)


#: Return the answer for a site; None to leave it to other rules.
Rule = Callable[[Site], KernelCall | Refusal | None]


@dataclass(frozen=True)
class Family:
    """The rules that one file of this folder declares.

    Attributes:
        rules: aten op -> the rule for its calls.
        goes_first: whether it is consulted before the other families, which follow if its rule returns None.
        is_asked_always: whether it is also consulted if the result stays float, to give the reason.
        is_of_engine: whether its kernels are those of torch's quantized engine; else this package's own.
    """

    rules: Mapping[Any, Rule]
    goes_first: bool = False
    is_asked_always: bool = False
    is_of_engine: bool = True
