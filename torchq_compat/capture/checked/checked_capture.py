"""Checked capture: returns a graph that computes what the float model computes, or raises.

The captured graph runs beside the float model, at the example's sizes and at two others. A capture that fails
or differs is followed by one that answers the model's Python with less freedom.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torchq_compat.capture.checked.attempts import (
    Attempt,
    CaptureCase,
    DependsOnValuesError,
    Way,
    attempt,
    differs,
    try_sizes,
)
from torchq_compat.errors import TorchQCompatError
from torchq_compat.packed_sequences.packing_mode import PackingMode
from torchq_compat.sizes.find_sizes import Group, group_of
from torchq_compat.sizes.input_sizes import SizeRule

__all__ = ["capture_checked"]

DIFFERS = "with that size free the captured graph differs from the float model"


def capture_checked(case: CaptureCase) -> tuple[CaptureCase, Attempt]:
    """Return the graph of ``case`` with as many free sizes as possible while it computes what the model does,
    and the case with the packing that it took.

    Raises:
        CaptureError: every captured graph computes something else than the float model.
        Exception: what was raised at the first attempt.
    """
    made: list[tuple[CaptureCase, Attempt]] = []
    errors: list[Exception] = []
    for changed, way in _ways(case):
        try:
            found = attempt(changed, way)
        except DependsOnValuesError:
            continue
        except Exception as cause:
            errors.append(cause)
            continue
        if found.is_right:
            return changed, found
        made.append((changed, found))
    for changed, found in made:
        if found.problem is None:
            return changed, _fix_wrong_sizes(changed, found)
    if errors:
        # What this package says of a model is told rather than where torch stopped.
        raise next((error for error in errors if isinstance(error, TorchQCompatError)), errors[0])
    problem = str(made[0][1].problem)
    raise differs(case, "the captured graph", problem)


def _ways(case: CaptureCase) -> Iterator[tuple[CaptureCase, Way]]:
    """Yield the ways to capture ``case``, one after the other until one is right."""
    if case.dynamic_shapes is not None:
        yield case, Way.SYMBOLS
        return
    yield case, Way.FOLLOWED
    yield case, Way.SYMBOLS
    if case.packing.packs:
        # The number of steps depends on the data, and the model computes with it.
        yield replace(case, packing=PackingMode(whole=True)), Way.SYMBOLS
    yield case, Way.FIXED


def _fix_wrong_sizes(case: CaptureCase, found: Attempt) -> Attempt:
    """Return ``found`` with rules that exclude the sizes at which it differs from the float model."""
    rules: dict[Group, list[SizeRule]] = {}
    for trial in [trial for trial in found.trials if trial.problem is not None]:
        alone = replace(found, trials=[], unknown=dict(found.unknown))
        for group, size in trial.groups.items():
            try_sizes(case, alone, {group: size})
        differing = [next(iter(other.groups.items())) for other in alone.trials if other.problem is not None]
        for group, size in differing or trial.groups.items():
            only_one = size == 1 and group not in rules
            rules[group] = list(_rules(found, group, only_one=only_one))
    sizes = found.sizes.with_rules([rule for group in rules.values() for rule in group])
    kept = [trial for trial in found.trials if trial.problem is None]
    return replace(found, sizes=sizes, trials=kept)


def _rules(found: Attempt, group: Group, *, only_one: bool) -> Iterator[SizeRule]:
    for number, dimension in enumerate(found.sizes.dimensions):
        if dimension.is_free and group_of(dimension) == group:
            rule = SizeRule.fixing(number, dimension, DIFFERS, by_python=True)
            if only_one:
                rule = replace(rule, condition=f"s{number} != 1", expected="more than 1")
            yield rule
