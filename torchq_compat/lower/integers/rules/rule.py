"""The answers of rules: how an op runs on integers, or the reason why it does not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from torchq_compat.lower.integers.lowered_graph import LoweredGraph
from torchq_compat.lower.integers.qdq_graph import Site

__all__ = ["Family", "Kernel", "Refusal", "Rule"]


@dataclass(frozen=True)
class Kernel:
    """How an op runs on integers.

    Attributes:
        name: shown to users.
        write: write it before the op; return the node that holds the integers of ``Site.result``, or its
            floats if they are not quantized.
        note: shown to users after the name.
        value: the node whose value it computes; None: ``Site.result.last``.
        is_as_reference: whether its value is that of the reference.
    """

    name: str
    write: Callable[[LoweredGraph], Node]
    note: str = ""
    value: Node | None = None
    is_as_reference: bool = True


@dataclass(frozen=True)
class Refusal:
    """Why an op does not run on integers; ``warn``: whether the user would be misled without a warning."""

    reason: str
    warn: bool = False


#: Return the answer for a site; None to leave it to other rules.
Rule = Callable[[Site], Kernel | Refusal | None]


@dataclass(frozen=True)
class Family:
    """The rules that one file of this folder declares: operator -> the rule for its calls."""

    rules: Mapping[Any, Rule]
