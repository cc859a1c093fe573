"""Checked capture: returns a graph that computes what the float model computes, or raises.

``backed_size_oblivious`` traces a size of 1 as "some number, not 1", which is wrong if the model depends on
the 1: after ``squeeze(1)``, or when a (N, 1, 1, T) mask broadcasts. So the captured graph runs beside the
float model, at the example's sizes and at two others, and if the results differ, more sizes are fixed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import sympy  # type: ignore[import-untyped]
from torch import Tensor

from torchq_compat.capture.checked.attempts import Attempt, CaptureCase, attempt, try_sizes
from torchq_compat.capture.checked.trial_inputs import Group, group_of
from torchq_compat.capture.sizes.input_sizes import Dimension, SizeRule
from torchq_compat.capture.torch_export import Statics, line_of_failure
from torchq_compat.errors import CaptureError, TorchQCompatError
from torchq_compat.packed_sequences.packing_mode import PackingMode

__all__ = ["capture_checked"]

#: The most captures that are tried, and how many more if sizes had to be fixed and are set free one by one.
ATTEMPTS, MORE_ATTEMPTS = 5, 4
DIFFERS = "with that size free the captured graph differs from the float model"


def capture_checked(case: CaptureCase) -> Attempt:
    """Return the graph of ``case`` with as many free sizes as possible while it computes what the model does.

    Raises:
        CaptureError: every captured graph computes something else than the float model.
        Exception: what torch.export raised at the first attempt.
    """
    search = _Search(case)
    found = search.run()
    if found is None:
        raise search.failure()
    return _fix_wrong_sizes(search.case, found)


@dataclass
class _Search:
    case: CaptureCase
    made: list[Attempt] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)
    most: int = ATTEMPTS
    tried: list[frozenset[tuple[str, int]]] = field(default_factory=list)

    def run(self) -> Attempt | None:
        first = self._try(())
        if first is None and self.case.packing.packs:
            # The number of steps depends on the data, and the model computes with it.
            self.case = replace(self.case, packing=PackingMode(whole=True))
            first = self._try(())
            del self.errors[0 if first is not None else 1 :]
        if (first is not None and first.is_right) or self.case.dynamic_shapes is not None:
            return first if first is not None and first.problem is None else None
        if self.errors and not _may_be_about_sizes(self.errors[0]):
            return None
        ones = self._sizes_of_one(first)
        for statics in _strategies(ones):
            found = self._try(statics)
            if found is not None and found.is_right:
                return self._set_free(found)
        equal = next((made for made in self.made if made.problem is None), None)
        if equal is not None:
            return equal
        for statics in self._fixed_sizes():
            found = self._try(statics)
            if found is not None and found.problem is None:
                self.most += MORE_ATTEMPTS
                return self._with_reason(self._set_free(found) if found.is_right else found)
        return None

    def _with_reason(self, found: Attempt) -> Attempt:
        """Return ``found``, with the line of the first error as the reason why sizes had to be fixed."""
        if not self.errors:
            return found
        return replace(found, sizes=found.sizes.with_line(found.statics, line_of_failure(self.errors[0])))

    def failure(self) -> Exception:
        if self.errors and not self.made:
            return self.errors[0]
        problem = self.made[0].problem if self.made else ""
        model = type(self.case.runs.model).__name__
        return CaptureError.differs(model, "the captured graph", str(problem))

    def _try(self, statics: Statics) -> Attempt | None:
        if len(self.made) + len(self.errors) >= self.most:
            return None
        self.tried.append(frozenset((*self.case.ones, *statics)))
        try:
            self.made.append(attempt(self.case, tuple(dict.fromkeys((*self.case.ones, *statics)))))
        except TorchQCompatError:
            raise
        except Exception as cause:
            self.errors.append(cause)
            return None
        return self.made[-1]

    def _sizes_of_one(self, first: Attempt | None) -> Statics:
        if first is None:
            return tuple(place for place in self._places() if self._size(place) == 1)
        return tuple((d.label, d.index) for d in first.sizes.dimensions if d.example == 1 and not d.is_fixed)

    def _fixed_sizes(self) -> Iterator[Statics]:
        places = self._places()
        if any(index == 0 for _, index in places):
            yield tuple(place for place in places if place[1] != 0)
        yield places

    def _places(self) -> Statics:
        tensors = [(label, leaf) for label, leaf in self.case.inputs.items() if isinstance(leaf, Tensor)]
        return tuple((label, index) for label, leaf in tensors for index in range(leaf.dim()))

    def _size(self, place: tuple[str, int]) -> int:
        return int(self.case.inputs[place[0]].shape[place[1]])

    def _set_free(self, found: Attempt) -> Attempt:
        """Return ``found``, or an attempt with more free dimensions that is also right."""
        for places in self._equal_sizes(found.statics) if len(found.statics) > 1 else ():
            fewer = tuple(other for other in found.statics if other not in places)
            if frozenset(fewer) in self.tried:
                continue
            freer = self._try(fewer)
            if freer is not None and freer.is_right:
                found = freer
        return found

    def _equal_sizes(self, statics: Statics) -> Iterator[Statics]:
        """Yield the fixed dimensions to set free together: those of equal size, because they are often one
        size, the last ones first; then each dimension of size 1 alone."""
        for size in dict.fromkeys(self._size(place) for place in reversed(statics)):
            if size != 1:
                yield tuple(place for place in statics if self._size(place) == size)
        yield from ((place,) for place in statics if self._size(place) == 1 and place not in self.case.ones)


def _strategies(ones: Statics) -> Iterator[Statics]:
    """Yield the dimensions of size 1 to fix: first all but leading ones, which are batches, then all."""
    inner = tuple(place for place in ones if place[1] != 0)
    if inner and inner != ones:
        yield inner
    if ones:
        yield ones


def _may_be_about_sizes(error: Exception) -> bool:
    text = f"{type(error).__name__} {error}"
    return not any(
        word in text for word in ("DataDependent", "data-dependent", "pytree", "Unsupported input")
    )


def _fix_wrong_sizes(case: CaptureCase, found: Attempt) -> Attempt:
    """Return ``found`` with rules that exclude the sizes at which it differs from the float model."""
    wrong = [trial for trial in found.trials if trial.problem is not None]
    if not wrong:
        return found
    rules: dict[Group, list[SizeRule]] = {}
    for trial in wrong:
        alone = replace_trials(found)
        for group, size in trial.groups.items():
            try_sizes(case, alone, {group: size})
        differing = [next(iter(other.groups.items())) for other in alone.trials if other.problem is not None]
        for group, size in differing or trial.groups.items():
            rules[group] = list(_rules(found, group, only_one=size == 1 and group not in rules))
    sizes = found.sizes.with_rules([rule for group in rules.values() for rule in group])
    kept = [trial for trial in found.trials if trial.problem is None]
    fixed = replace_trials(found)
    fixed.sizes, fixed.trials = sizes, kept
    return fixed


def replace_trials(found: Attempt) -> Attempt:
    """Return a copy of ``found`` without trials."""
    return replace(found, trials=[], unknown=dict(found.unknown))


def _rules(found: Attempt, group: Group, *, only_one: bool) -> Iterator[SizeRule]:
    for dimension in found.sizes.symbols.values():
        if group_of(dimension) == group:
            yield _not_one(dimension) if only_one else _as_in_example(dimension)


def _not_one(dimension: Dimension) -> SizeRule:
    condition = sympy.Ne(dimension.expression, 1, evaluate=False)
    return SizeRule(condition, dimension, "more than 1", DIFFERS, by_python=True)


def _as_in_example(dimension: Dimension) -> SizeRule:
    condition = sympy.Eq(dimension.expression, dimension.example, evaluate=False)
    return SizeRule(condition, dimension, str(dimension.example), DIFFERS, by_python=True)
