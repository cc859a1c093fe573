"""What a prepared model of ours wants from a state, and the names FX may have it under."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

__all__ = ["FoldedBatchNorm", "Wanted", "WantedObserver", "WantedTensor"]


@dataclass(frozen=True)
class WantedTensor:
    """A parameter or buffer.

    Attributes:
        name: in our state_dict.
        names: in FX's, in the order they are tried.
        observer: the path of the observer of this weight; None: it is not quantized.
        more_observers: of a weight that several calls are given: the paths of those of the other calls.
        is_functional: whether a function is given it: FX packs it by its order in the graph.
        packed_with: of a function's bias, our name of the weight that FX packs it with.
        is_optional: whether FX may do without it.
    """

    name: str
    names: tuple[str, ...]
    observer: str | None = None
    is_functional: bool = False
    packed_with: str | None = None
    is_optional: bool = False
    more_observers: tuple[str, ...] = ()

    @property
    def observers(self) -> tuple[str, ...]:
        """The paths of all observers of this weight."""
        return (() if self.observer is None else (self.observer,)) + self.more_observers


@dataclass(frozen=True)
class WantedObserver:
    """An observer or fake-quantize.

    Attributes:
        path: of ours.
        prefixes: what FX's prepared model calls the same observer; several where it has several names.
        scales: what FX's converted model may call its scale.
        is_weight: whether it observes a weight: a converted model has its qparams with the integers.
        handed_on: scales of what it hands on as it is, for a lowered model that has none of its own.
        kernel: scale and zero point of the result of FX's kernel; a lowered model may have no others.
    """

    path: str
    prefixes: tuple[str, ...]
    scales: tuple[str, ...] = ()
    is_weight: bool = False
    kernel: tuple[float, int] | None = None
    handed_on: tuple[str, ...] = ()


@dataclass(frozen=True)
class FoldedBatchNorm:
    """A batch norm that trains on its own here and that FX folds at convert.

    Attributes:
        gamma, beta, mean, variance: names in our state_dict.
        eps: of the batch norm.
        biases: FX's names of the bias it is folded into.
        own_bias: our name of the bias in front of it; None if there is none.
    """

    gamma: str
    beta: str
    mean: str
    variance: str
    eps: float
    biases: tuple[str, ...]
    own_bias: str | None


@dataclass(frozen=True)
class Wanted:
    """All that a model, or a module of it, wants.

    Attributes:
        only_fx: prefixes and scales of FX that have no place here, for a known reason.
        unused: prefixes and scales that FX itself makes no use of.
        problems: why names of FX cannot be told apart, for an error.
    """

    tensors: tuple[WantedTensor, ...] = ()
    observers: tuple[WantedObserver, ...] = ()
    folded: tuple[FoldedBatchNorm, ...] = ()
    only_fx: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    def __add__(self, other: Wanted) -> Wanted:
        return Wanted(
            self.tensors + other.tensors,
            self.observers + other.observers,
            self.folded + other.folded,
            self.only_fx + other.only_fx,
            self.unused + other.unused,
            self.problems + other.problems,
        )

    def below(self, path: str) -> Self:
        """The same with our names below ``path``; those of FX are whole already."""

        def at(name: str) -> str:
            return f"{path}.{name}" if path else name

        return replace(
            self,
            tensors=tuple(
                replace(
                    each,
                    name=at(each.name),
                    observer=None if each.observer is None else at(each.observer),
                    more_observers=tuple(at(path) for path in each.more_observers),
                    packed_with=None if each.packed_with is None else at(each.packed_with),
                )
                for each in self.tensors
            ),
            observers=tuple(replace(each, path=at(each.path)) for each in self.observers),
            folded=tuple(
                replace(
                    each,
                    gamma=at(each.gamma),
                    beta=at(each.beta),
                    mean=at(each.mean),
                    variance=at(each.variance),
                    own_bias=None if each.own_bias is None else at(each.own_bias),
                )
                for each in self.folded
            ),
        )
