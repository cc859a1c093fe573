"""Judge the measured values of a comparison, and explain why the two sides differ."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torchq_compat.comparison import recognised_differences as known
from torchq_compat.comparison.results import (
    Capture,
    Finding,
    FxOutcome,
    Kind,
    Point,
    QParamsView,
    Side,
    Status,
    Verdict,
)

# Explain why the two sides differ: one rule for each known difference, based on measured values only.
#
# A rule returns a finding for a point, or None; ``find_causes`` tries the rules in order for each point.


#: SQNR differences below this are rounding noise.
DECIBELS = 0.5
MUCH_DECIBELS = 3.0
SATURATED = 0.01
FIXED_QPARAMS = ("sigmoid", "tanh", "softmax", "hardsigmoid")
SHARING_OPS = ("mean", "cat", "stack", "flatten", "reshape", "view", "transpose", "permute", "squeeze")


def find_causes(capture: Capture) -> tuple[Finding, ...]:
    """Return what differs, where and why; the places are in graph order."""
    findings = [*_of_fx(capture), *_left_float(capture)]
    explained: set[str] = set()
    for point in capture.points:
        finding = _of_point(point, capture)
        if finding is not None:
            findings.append(finding)
            explained.add(point.name)
    findings += _of_outputs(capture, something_explained=bool(explained))
    return tuple(findings)


def _of_fx(capture: Capture) -> Iterator[Finding]:
    if capture.fx.outcome is FxOutcome.RAISED:
        yield Finding("FX", f"raised {capture.fx.error}", known.FX_RAISES.why, known.FX_RAISES.link)
    if capture.fx.lowering_error:
        what = f"convert_fx raised {capture.fx.lowering_error}"
        yield Finding("FX", what, known.LOWERING.why, known.LOWERING.link)


def _left_float(capture: Capture) -> Iterator[Finding]:
    for left in capture.left_float:
        yield Finding(left.path, f"{left.kind} stays float here", left.reason, known.LEFT_FLOAT.link)


def _of_point(point: Point, capture: Capture) -> Finding | None:
    for rule in (
        _same_qparams_for_all,
        _one_side,
        _fixed_input,
        _fixed_part,
        _trained_range,
        _shared_observer,
        _other_qparams,
        _saturated,
    ):
        finding = rule(point, capture)
        if finding is not None:
            return finding
    return None


def _same_qparams_for_all(point: Point, capture: Capture) -> Finding | None:
    """Find a result of several layers or directions that FX quantizes with the qparams of one of them."""
    ours, fx = point.ours.qparams, point.fx.qparams if point.fx else None
    if point.kind is not Kind.RESULT or ours is None or fx is None or point.fx is None:
        return None
    if len(ours.scales) < 2 or len(fx.scales) > 1:
        return None
    owner = _owner_of(fx, point, capture)
    on = f"with the qparams of {owner}" if owner else "on one set of qparams"
    what = (
        f"FX quantizes all of it {on} ({qparams_text(fx)}), {_saturation(point.fx)}, {point.fx.sqnr:.1f} dB; "
        f"here {len(ours.scales)} sets of qparams, {_saturation(point.ours)}, {point.ours.sqnr:.1f} dB"
    )
    return Finding(point.name, what, known.SAME_QPARAMS.why, known.SAME_QPARAMS.link)


def _owner_of(qparams: QParamsView, point: Point, capture: Capture) -> str:
    """Return the cell whose part has these qparams on FX's side; empty if there is none."""
    module = point.name.partition("[")[0]
    for other in capture.points:
        is_inside = other.kind is Kind.PART and other.name.startswith(f"{module}.")
        if is_inside and other.fx and other.fx.qparams and other.fx.qparams.same_qparams(qparams):
            return other.name.rpartition(".cell.")[0] or other.name
    return ""


def _one_side(point: Point, capture: Capture) -> Finding | None:
    if point.fx is None or (point.ours.qparams is None) == (point.fx.qparams is None):
        return None
    if point.ours.qparams is None:
        what = f"quantized by FX ({qparams_text(point.fx.qparams)}), float here"
    else:
        what = f"quantized here ({qparams_text(point.ours.qparams)}), float in FX"
    return Finding(point.name, what, point.reason, known.ONE_SIDE.link)


def _fixed_input(point: Point, capture: Capture) -> Finding | None:
    """Find equal output qparams with a far worse SQNR in FX: there the input was saturated."""
    if not _has_fixed_qparams(point) or not _same_qparams(point) or point.fx is None:
        return None
    if point.ours.sqnr - point.fx.sqnr < MUCH_DECIBELS or point.fx.sqnr >= 20:
        return None
    cause = known.GATE_INPUT if point.kind is Kind.PART else known.FIXED_INPUT
    return Finding(point.name, _decibels(point.ours, point.fx), cause.why, cause.link)


def _fixed_part(point: Point, capture: Capture) -> Finding | None:
    if point.kind is not Kind.PART or not _has_fixed_qparams(point) or not _different_qparams(point):
        return None
    return Finding(point.name, _both_qparams(point), known.FIXED_PARTS.why, known.FIXED_PARTS.link)


def _trained_range(point: Point, capture: Capture) -> Finding | None:
    ours, fx = point.ours.qparams, point.fx.qparams if point.fx else None
    if ours is None or fx is None or ours.dtype != fx.dtype or ours.is_full_range or not fx.is_full_range:
        return None
    return Finding(point.name, _both_qparams(point), known.TRAINED_RANGE.why, known.TRAINED_RANGE.link)


def _shared_observer(point: Point, capture: Capture) -> Finding | None:
    operation = point.operation.lower()
    if not any(operation.startswith(op) for op in SHARING_OPS) or not _different_qparams(point):
        return None
    if not any(other.kind is Kind.RESULT for other in capture.points):
        return None
    return Finding(point.name, _both_qparams(point), known.SHARED_OBSERVER.why, known.SHARED_OBSERVER.link)


def _other_qparams(point: Point, capture: Capture) -> Finding | None:
    if not _different_qparams(point):
        return None
    return Finding(point.name, _both_qparams(point), known.NOT_EXPLAINED.why, known.NOT_EXPLAINED.link)


def _saturated(point: Point, capture: Capture) -> Finding | None:
    if (point.ours.saturated or 0.0) < SATURATED or _has_fixed_qparams(point):
        return None
    also = f", in FX {_saturation(point.fx)}" if point.fx else ""
    what = f"{_saturation(point.ours)}{also}"
    return Finding(point.name, what, known.DIFFERENT_RANGES.why, known.DIFFERENT_RANGES.link)


def _of_outputs(capture: Capture, *, something_explained: bool) -> Iterator[Finding]:
    """Yield the differences at the outputs that no place before them explains."""
    for output in capture.outputs:
        if output.steps is None or output.fx is None or output.steps.share == 0 or something_explained:
            continue
        by = f"{output.steps.share:.2%} of the values differ, by {output.steps.largest:.2g} steps at most"
        worse = output.ours.sqnr < output.fx.sqnr - DECIBELS
        cause = known.NOT_EXPLAINED if worse else known.ROUNDING
        yield Finding(output.name, by, cause.why, cause.link)


def _has_fixed_qparams(point: Point) -> bool:
    """Return whether ``point`` has fixed qparams: their range ends at the limits of the function, so values
    there lose less than a step."""
    words = point.operation.replace("(", " ").replace(".", " ").lower().split()
    return any(word in FIXED_QPARAMS for word in words)


def _same_qparams(point: Point) -> bool:
    fx = point.fx.qparams if point.fx else None
    return point.ours.qparams is not None and fx is not None and point.ours.qparams.same_qparams(fx)


def _different_qparams(point: Point) -> bool:
    fx = point.fx.qparams if point.fx else None
    return point.ours.qparams is not None and fx is not None and not point.ours.qparams.same_qparams(fx)


def _both_qparams(point: Point) -> str:
    assert point.fx is not None
    all_qparams = f"{qparams_text(point.ours.qparams)} here, {qparams_text(point.fx.qparams)} in FX"
    return f"{all_qparams}; {_decibels(point.ours, point.fx)}"


def _decibels(ours: Side, fx: Side) -> str:
    return f"{ours.sqnr:.1f} dB here, {fx.sqnr:.1f} dB in FX"


def _saturation(side: Side) -> str:
    return f"{side.saturated or 0.0:.1%} saturated"


def qparams_text(qparams: QParamsView | None) -> str:
    """Return dtype, scale (s) and zero point (z) as a short text."""
    if qparams is None:
        return "float"
    pairs = [f"s={s:.4g} z={z}" for s, z in zip(qparams.scales, qparams.zero_points, strict=True)]
    shown = " | ".join(pairs) if len(pairs) <= 2 else f"{len(pairs)} pairs"
    limits = "" if qparams.is_full_range else f" {qparams.quant_min}..{qparams.quant_max}"
    return f"{qparams.dtype} {shown}{limits}"


# Judge the measured values of a comparison.


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
    quality = ", ".join(f"{output.name} {_whole_decibels(output)}" for output in capture.outputs)
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


def _whole_decibels(output: Point) -> str:
    if output.fx is None:
        return f"{decibel_text(output.ours.sqnr)}"
    return f"{decibel_text(output.ours.sqnr)} (FX {decibel_text(output.fx.sqnr)})"


def decibel_text(sqnr: float) -> str:
    return "bit-equal" if math.isinf(sqnr) and sqnr > 0 else f"{sqnr:.1f} dB"
