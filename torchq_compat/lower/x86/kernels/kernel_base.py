"""Answers of the kernel families: a kernel call, or the reason why there is none."""

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
    """An argument: what ``node`` gives, as a quantized tensor."""

    node: Node


@dataclass(frozen=True)
class Floats:
    """An argument: what ``node`` gives, in floats."""

    node: Node


@dataclass(frozen=True)
class Constant:
    """An argument: a value made now, packed weights mostly."""

    value: Any


@dataclass(frozen=True)
class KernelCall:
    """A kernel that computes what an op and its q-dq compute.

    Attributes:
        args: its arguments; values of the graph are ``Quantized``, ``Floats`` or ``Constant``, or the results
            of other calls.
        covers: the nodes of the reference graph it stands for, beside the node its result stands for.
        returns_floats: whether the result is floats; else it is a quantized tensor with the qparams of the
            site.
        stands_for: the node whose value a result in floats is; None: the op, or the ReLU behind it.
        name: shown to users in place of ``kernel``, where several kernels compute the result.
        note: shown to users behind the name.
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
    """Why an op has no kernel here; ``warn``: whether the user could be misled by not knowing."""

    reason: str
    warn: bool = False


@dataclass(frozen=True)
class Site:
    """An op of the reference graph that a rule is asked about.

    Attributes:
        op: the op.
        relu: the ReLU behind it, if that is all that reads it.
        follower: the op behind it that one kernel may compute with it.
        qparams: the qparams its result is quantized with; None where it stays floats.
        qparams_of: the qparams of a node's values, if they have any.
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


#: Looks at an op; None: it says nothing about it.
Rule = Callable[[Site], KernelCall | Refusal | None]


@dataclass(frozen=True)
class Family:
    """The rules that one file of this folder declares.

    Attributes:
        rules: aten op -> the rule that is asked about its calls.
        goes_first: whether it is asked before the others, which are asked where its rule says nothing.
        is_asked_always: whether it is asked also where the result stays float, to say why.
        is_of_engine: whether its kernels are torch's, those of the quantized engine; else this package's own.
    """

    rules: Mapping[Any, Rule]
    goes_first: bool = False
    is_asked_always: bool = False
    is_of_engine: bool = True
