"""The values that a prepared model needs from a state of FX, and the names FX may have given them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Generic, Self, TypeVar

# Assign FX's numbered scales to the places of a graph.
#
# FX numbers the scales of one name in the order of its graph. An exported graph has the same order, with
# two exceptions: in FX's graph a parameter is at the position where Python read it, which may be long
# before the op that uses it; and ops that torch.export drops have a scale in FX's graph. A lowered model
# lacks the scales that its modules and kernels hold. So places and numbers are aligned in the way that
# agrees best.


Key = TypeVar("Key")

#: The costs of a scale without a place, and of a place without its scale: only if nothing else agrees.
EXTRA, LACKED = 20.0, 1000.0
#: The costs of a scale for a place that may lack it, and of each place by which a parameter moves.
UNLIKELY, MOVED = 0.1, 1e-3
#: The cost of equal qparams where new ones are expected, or the other way round.
UNLIKE = 1.0
MOST_EXTRA = 16
#: The number of parameters that may be read in another order than they are used.
WINDOW = 6
NOWHERE = math.inf


@dataclass(frozen=True)
class QuantizedValue(Generic[Key]):
    """A value of our graph that FX quantizes.

    Attributes:
        may_lack: whether the model may lack its scale.
        is_new: whether it is the first place that its observer sees; later places have the same qparams. None
            if unknown.
        as_before: whether the observer of the place before observes it too.
        mismatch: for a parameter, which may be anywhere before its reader: the difference of the scale of an
            index from the expected scale; 0 if they are equal.
    """

    key: Key
    may_lack: bool = False
    is_new: bool | None = None
    as_before: bool = False
    mismatch: Callable[[int], float] | None = None


@dataclass(frozen=True)
class Number:
    """A scale of FX.

    Attributes:
        repeats: whether an earlier scale, of any name, has the same qparams.
        as_before: whether the previous number has the same qparams.
    """

    repeats: bool
    as_before: bool


@dataclass
class _State(Generic[Key]):
    cost: float
    #: The states of the previous index, with the step to this state: a place, or None for an extra scale.
    before: list[tuple[tuple[int, frozenset[int], int], QuantizedValue[Key] | None]] = field(
        default_factory=list
    )


def laid_beside(
    places: Sequence[QuantizedValue[Key]], given: Mapping[int, Number], is_whole: bool
) -> tuple[dict[Key, set[int]], set[int]] | None:
    """Align ``places``, in the order of the graph, with the numbers of FX's scales.

    Args:
        places: the places; a parameter is at the position of its reader.
        given: the existing numbers.
        is_whole: whether each place has its scale, as in a reference model.

    Returns:
        For each place, the numbers that agree equally well, empty if it lacks its scale; and the numbers
        without a place. None if no alignment exists.
    """
    fixed = [place for place in places if place.mismatch is None]
    floating = [(index, place) for index, place in enumerate(places) if place.mismatch is not None]
    ahead = [sum(place.mismatch is None for place in places[:index]) for index, _ in floating]
    last = max(given, default=-1)
    if is_whole and len(given) < max(last + 1, len(places)):
        return None
    layer: dict[tuple[int, frozenset[int], int], _State[Key]] = {(0, frozenset(), 0): _State(0.0)}
    layers = [layer]
    ends: list[tuple[int, tuple[int, frozenset[int], int]]] = []
    for number in range(last + 1 + len(places) + 1):
        if number > last:
            ends += [(number, key) for key in layer if key[0] == len(fixed) and len(key[1]) == len(floating)]
        following: dict[tuple[int, frozenset[int], int], _State[Key]] = {}
        for key, state in layer.items():
            for after, place, cost in _steps(key, number, fixed, floating, ahead, given):
                total = state.cost + cost
                known = following.setdefault(after, _State(NOWHERE))
                if total < known.cost - 1e-9:
                    known.cost, known.before = total, []
                if total <= known.cost + 1e-9:
                    known.before.append((key, place))
        layers.append(following)
        layer = following
    if not ends:
        return None
    best = min(layers[number][key].cost for number, key in ends)
    if best == NOWHERE:
        return None
    matches: dict[Key, set[int]] = {place.key: set() for place in places}
    extra: set[int] = set()
    todo = {end for end in ends if layers[end[0]][end[1]].cost <= best + 1e-9}
    seen = set(todo)
    while todo:
        number, key = todo.pop()
        for before, place in layers[number][key].before:
            if number - 1 in given:
                (extra if place is None else matches[place.key]).add(number - 1)
            if (number - 1, before) not in seen:
                seen.add((number - 1, before))
                todo.add((number - 1, before))
    return matches, extra


def _steps(
    key: tuple[int, frozenset[int], int],
    number: int,
    fixed: Sequence[QuantizedValue[Key]],
    floating: Sequence[tuple[int, QuantizedValue[Key]]],
    ahead: Sequence[int],
    given: Mapping[int, Number],
) -> Iterator[tuple[tuple[int, frozenset[int], int], QuantizedValue[Key] | None, float]]:
    """Yield the places that ``number`` may belong to, each with the state after it and the cost."""
    done, placed, extra = key
    is_given = number in given
    waiting = [index for index in range(len(floating)) if index not in placed]
    # A parameter is read before the op that uses it.
    if done < len(fixed) and all(ahead[index] > done for index in waiting):
        place = fixed[done]
        if is_given:
            cost = UNLIKELY if place.may_lack else 0.0
            cost += UNLIKE * (place.is_new is given[number].repeats)
            cost += UNLIKE * (place.as_before and not given[number].as_before)
        else:
            cost = 0.0 if place.may_lack else LACKED
        yield (done + 1, placed, extra), place, cost
    for index in waiting[:WINDOW]:
        place = floating[index][1]
        assert place.mismatch is not None
        cost = MOVED * (ahead[index] - done)
        if is_given:
            yield (done, placed | {index}, extra), place, cost + place.mismatch(number)
        elif place.may_lack:
            yield (done, placed | {index}, extra), place, cost
    if extra < MOST_EXTRA and (given[number].repeats if is_given else number <= max(given, default=-1)):
        yield (done, placed, extra + 1), None, EXTRA


# The values that a prepared model of ours needs from a state, and the names that FX may give them.


@dataclass(frozen=True)
class RequiredTensor:
    """A parameter or buffer.

    Attributes:
        name: its name in our state_dict.
        names: its possible names in FX's state_dict, in the order they are tried.
        observers: the paths of the observers of this weight, one for each call that quantizes it.
        is_functional: whether a function uses it: FX packs it by its order in the graph.
        packed_with: for the bias of a function: our name of the weight that FX packs it with.
        is_optional: whether FX's state may lack it.
    """

    name: str
    names: tuple[str, ...]
    observers: tuple[str, ...] = ()
    is_functional: bool = False
    packed_with: str | None = None
    is_optional: bool = False


@dataclass(frozen=True)
class RequiredObserver:
    """An observer or fake-quantize.

    Attributes:
        path: the path of our observer.
        prefixes: the possible names of the same observer in FX's prepared model.
        scales: the possible names of its scale in FX's converted model.
        is_weight: whether it observes a weight: a converted model has its qparams with the integers.
        handed_on: the scales of the input of an op that passes it on unchanged, for a lowered model, in which
            the op has no scale.
        kernel: scale and zero point of the result of FX's kernel; a lowered model may have no others.
        trained_float: whether FX trains what it observes in floats: the weights of transposed convolutions.
    """

    path: str
    prefixes: tuple[str, ...]
    scales: tuple[str, ...] = ()
    is_weight: bool = False
    kernel: tuple[float, int] | None = None
    handed_on: tuple[str, ...] = ()
    trained_float: bool = False


@dataclass(frozen=True)
class FoldedBatchNorm:
    """A batch norm that is trained separately here and that FX folds at convert.

    Attributes:
        names: the attribute of nn.BatchNorm -> the name in our state_dict.
        eps: the eps of the batch norm.
        biases: FX's names of the bias it is folded into.
        own_bias: our name of the bias of the layer before it; None if there is none.
    """

    names: Mapping[str, str]
    eps: float
    biases: tuple[str, ...]
    own_bias: str | None


@dataclass(frozen=True)
class Required:
    """The values that a model, or a module of it, needs.

    Attributes:
        only_fx: prefixes and scales of FX that have no place here, for a known reason.
        unused: prefixes and scales that FX itself does not use.
        problems: the reasons why names of FX are ambiguous, for an error.
    """

    tensors: tuple[RequiredTensor, ...] = ()
    observers: tuple[RequiredObserver, ...] = ()
    folded: tuple[FoldedBatchNorm, ...] = ()
    only_fx: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    def __add__(self, other: Required) -> Required:
        return Required(*(getattr(self, item.name) + getattr(other, item.name) for item in fields(self)))

    def below(self, path: str) -> Self:
        """Return the same with our names below ``path``; FX's names are complete already."""

        def at(name: Any) -> Any:
            return f"{path}.{name}" if path and name is not None else name

        tensors = tuple(
            replace(t, name=at(t.name), observers=tuple(map(at, t.observers)), packed_with=at(t.packed_with))
            for t in self.tensors
        )
        observers = tuple(replace(observer, path=at(observer.path)) for observer in self.observers)
        folded = tuple(
            replace(norm, names={k: at(v) for k, v in norm.names.items()}, own_bias=at(norm.own_bias))
            for norm in self.folded
        )
        return replace(self, tensors=tensors, observers=observers, folded=folded)
