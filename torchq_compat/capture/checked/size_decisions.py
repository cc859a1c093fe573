"""Decisions about a capture, for ``explain``: about each dimension of each input, and each inlined block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torchq_compat.capture.checked.attempts import Attempt, CaptureCase
from torchq_compat.capture.checked.trial_inputs import with_sizes
from torchq_compat.sizes.find_sizes import group_of
from torchq_compat.sizes.input_sizes import Dimension, SizeRule
from torchq_compat.support.decisions import Action, Decision

__all__ = ["decide_blocks", "decide_sizes"]


def decide_sizes(case: CaptureCase, found: Attempt) -> Iterator[Decision]:
    """Yield a decision about every dimension of ``found``, and every input that is a number; a warning if
    Python code fixed a dimension that the float model accepts at other sizes too."""
    rules: dict[tuple[str, int], list[SizeRule]] = {}
    for rule in found.sizes.rules:
        rules.setdefault((rule.dimension.label, rule.dimension.index), []).append(rule)
    for dimension in found.sizes.dimensions:
        own = rules.get((dimension.label, dimension.index), [])
        yield _decide(case, found, dimension, own)
    for label, value in found.sizes.constants.items():
        if isinstance(value, (int, float)):
            reason = f"at {value!r}, its value in example_inputs; only tensors stay free"
            yield Decision(f"input {label}", "value", Action.FIXED, reason)


def decide_blocks(found: Attempt, *, is_qat: bool) -> Iterator[Decision]:
    """Yield a decision about every block under ``torch.no_grad`` or autocast."""
    for block in found.blocks:
        if block.casts:
            reason = (
                "its ops are quantized and run in the dtype they are given, as in FX, which traced through"
            )
            yield Decision(block.path, block.context, Action.DROPPED, reason)
        else:
            reason = "its ops are quantized like the others, and gradients flow through them, as in FX"
            yield Decision(block.path, block.context, Action.DROPPED, reason, warn=is_qat)


def _decide(case: CaptureCase, found: Attempt, dimension: Dimension, rules: list[SizeRule]) -> Decision:
    path, kind = f"input {dimension.label}", f"dimension {dimension.index}"
    if dimension.is_fixed:
        rule = rules[0] if rules else None
        at = f"at {dimension.example}"
        line = f" by {rule.line}" if rule is not None and rule.line else ""
        warn = rule is not None and rule.by_python and _runs_elsewhere(case, found, dimension)
        return Decision(path, kind, Action.FIXED, f"{at}{line}", warn=warn)
    by_python = any(rule.by_python for rule in rules)
    warn = by_python and _runs_elsewhere(case, found, dimension)
    constant = f"{dimension.name} == {dimension.example}"
    is_constant = any(rule.expected in (constant, str(dimension.example)) for rule in rules)
    action = Action.FIXED if is_constant else Action.FREE
    return Decision(path, kind, action, _conditions(found, dimension, rules), warn=warn)


def _conditions(found: Attempt, dimension: Dimension, rules: list[SizeRule]) -> str:
    # The limits of operators are those of the float model too, and are not reported.
    told = [rule for rule in rules if rule.by_python or "==" in rule.expected]
    words = [f"it is {rule.expected}" if rule.is_computed else rule.expected for rule in told]
    texts = [f"{each} ({rule.line})" if rule.line else each for each, rule in zip(words, told, strict=True)]
    texts = list(dict.fromkeys(texts))
    if group_of(dimension) in found.unknown:
        error = str(found.unknown[group_of(dimension)]).strip().split("\n", 1)[0]
        texts.append(f"not checked, the float model itself fails at other sizes: {error[:120]}")
    return "as long as " + "; ".join(texts) if texts else "checked against the float model"


def _runs_elsewhere(case: CaptureCase, found: Attempt, dimension: Dimension) -> bool:
    """Return whether the float model accepts another size of ``dimension``, alone or together with all
    dimensions of the same size in the example."""
    if not dimension.is_fixed and any(group_of(dimension) in trial.groups for trial in found.trials):
        return True
    alike = {each.place for each in found.sizes.dimensions if each.example == dimension.example}
    inputs: Mapping[str, Any] = case.inputs
    for places in ({dimension.place}, alike):
        for size in (dimension.example - 1, 2 * dimension.example + 1):
            args = with_sizes(case.args, inputs, dict.fromkeys(places, size))
            if size > 0 and case.runs.of_float_model(args).error is None:
                return True
    return False
