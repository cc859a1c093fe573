"""The values that a prepared model of ours needs from a state, and the names that FX may give them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

__all__ = ["FoldedBatchNorm", "Wanted", "WantedObserver", "WantedTensor"]


@dataclass(frozen=True)
class WantedTensor:
    """A parameter or buffer.

    Attributes:
        name: its name in our state_dict.
        names: its possible names in FX's state_dict, in the order they are tried.
        observer: the path of the observer of this weight; None if it is not quantized.
        more_observers: for a weight that several calls use: the paths of the other calls' observers.
        is_functional: whether a function uses it: FX packs it by its order in the graph.
        packed_with: for the bias of a function: our name of the weight that FX packs it with.
        is_optional: whether FX's state may lack it.
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
        path: the path of our observer.
        prefixes: the possible names of the same observer in FX's prepared model.
        scales: the possible names of its scale in FX's converted model.
        is_weight: whether it observes a weight: a converted model has its qparams with the integers.
        handed_on: the scales of the input of an op that passes it on unchanged, for a lowered model, in which
            the op has no scale.

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
    """A batch norm that is trained separately here and that FX folds at convert.

    Attributes:
        gamma, beta, mean, variance: their names in our state_dict.
        eps: the eps of the batch norm.
        biases: FX's names of the bias it is folded into.
        own_bias: our name of the bias of the layer before it; None if there is none.
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
    """The values that a model, or a module of it, needs.

    Attributes:
        only_fx: prefixes and scales of FX that have no place here, for a known reason.
        unused: prefixes and scales that FX itself does not use.
        problems: the reasons why names of FX are ambiguous, for an error.
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
        """Return the same with our names below ``path``; FX's names are complete already."""

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
