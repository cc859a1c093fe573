"""Judge the measured values of a comparison."""

from __future__ import annotations

import math

from torchq_compat.migrate.comparison.causes import DECIBELS, find_causes
from torchq_compat.migrate.comparison.results import Capture, FxOutcome, Point, Status, Verdict

__all__ = ["decibel_text", "gain", "judge"]

#: Two sides count as the same if at most this share of an output's values is more than one step apart.
BEYOND_ONE_STEP = 0.001


def judge(capture: Capture) -> Verdict:
    status = _status(capture)
    nothing = capture.quantized_count == 0
    return Verdict(status, _headline(status, capture, nothing), find_causes(capture), nothing)


def _status(capture: Capture) -> Status:
    compared = [output for output in capture.outputs if output.fx is not None]
    if not compared:
        return Status.WITHOUT_FX
    if all(_same(output) for output in compared):
        return Status.SAME
    gains = [gain(output) for output in compared]
    if min(gains) < -DECIBELS:
        return Status.WORSE
    return Status.BETTER if max(gains) > DECIBELS else Status.SIMILAR


def _same(output: Point) -> bool:
    steps = output.steps
    return steps is not None and steps.by_two + steps.by_more <= BEYOND_ONE_STEP


def gain(output: Point) -> float:
    """Return our SQNR minus FX's, in dB."""
    assert output.fx is not None
    ours, fx = output.ours.sqnr, output.fx.sqnr
    return 0.0 if ours == fx else ours - fx


def _headline(status: Status, capture: Capture, nothing_quantized: bool) -> str:
    if nothing_quantized:
        return f"Nothing in {capture.model} is quantized here."
    quality = ", ".join(f"{output.name} {_decibels(output)}" for output in capture.outputs)
    match status:
        case Status.WITHOUT_FX:
            absent = "cannot run this model" if capture.fx.outcome is FxOutcome.RAISED else "was not run"
            return f"FX {absent}. Against the float model: {quality}."
        case Status.SAME:
            return f"The same as FX: at most one step apart in 99.9% of every output. {quality}."
        case Status.BETTER:
            return f"Nearer to the float model than FX. {quality}."
        case Status.SIMILAR:
            return f"As near to the float model as FX, within {DECIBELS} dB. {quality}."
        case Status.WORSE:
            return f"Farther from the float model than FX. {quality}."


def _decibels(output: Point) -> str:
    if output.fx is None:
        return f"{decibel_text(output.ours.sqnr)}"
    return f"{decibel_text(output.ours.sqnr)} (FX {decibel_text(output.fx.sqnr)})"


def decibel_text(sqnr: float) -> str:
    return "bit-equal" if math.isinf(sqnr) and sqnr > 0 else f"{sqnr:.1f} dB"
