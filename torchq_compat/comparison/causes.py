"""Judge the measured values of a comparison, and explain why the two sides differ."""

import math
from collections.abc import Iterator

from torchq_compat.codes import CODES, DIFFERENCES
from torchq_compat.comparison import results
from torchq_compat.port.constructs import GUIDE_PAGES

# Explain why the two sides differ, based on measured values only.


#: SQNR differences below this are rounding noise.
DECIBELS = 0.5
MUCH_DECIBELS = 3.0
SATURATED = 0.01
FIXED_QPARAMS = ("sigmoid", "tanh", "softmax", "hardsigmoid")
SHARING_OPS = ("mean", "cat", "stack", "flatten", "reshape", "view", "transpose", "permute", "squeeze")
DIFFERENCES_PAGE = f"{GUIDE_PAGES}/differences.md"
#: Anchor in that page -> what it says; the first three are of no known difference.
WHY = {
    "": "No difference that the guide explains is recognised here; migration/guide/differences.md lists "
    "rarer ones, by model and configuration. If the SQNR here is the lower one, it is worth a report.",
    "rounding": "torch.quantize_per_tensor and quantized_decomposed.quantize_per_tensor round a few values "
    "to different integers, and what follows carries the step on.",
    "known-differences-from-fx": "",
    **{known.anchor: known.sentence for known in DIFFERENCES.values() if known.anchor},
}
CODE_OF = {known.anchor: known.code for known in DIFFERENCES.values()}
LOWERING = "Only FX's reference conversion is compared; its size and latency are not known."


def find_causes(capture: results.Capture) -> tuple[results.Finding, ...]:
    """Return what differs, where and why; the places are in graph order."""
    findings: list[results.Finding] = []
    if capture.fx.outcome is results.FxOutcome.RAISED:
        findings.append(_finding("FX", "what-fx-cannot-run", f"raised {capture.fx.error}"))
    if capture.fx.lowering_error:
        findings.append(_finding("FX", "", f"convert_fx raised {capture.fx.lowering_error}", LOWERING))
    for left in capture.left_float:
        what = f"{left.kind} stays float here"
        findings.append(_finding(left.path, "known-differences-from-fx", what, left.why, left.code))
    measured = {
        finding.where: finding
        for point in capture.points
        if (finding := _of_point(point, capture)) is not None
    }
    of_outputs = () if measured else _of_outputs(capture)
    for place in capture.unlike_fx if capture.fx.outcome is results.FxOutcome.RAN else ():
        # In the words and with the code that prepare_fx and explain give.
        link = f"{GUIDE_PAGES}/{CODES[place.code].page}#{place.code.lower()}"
        alone = f"{place.kind} has other numbers in FX"
        what = measured[place.path].what if place.path in measured else alone
        measured[place.path] = results.Finding(place.path, what, place.why, link, place.code)
    return (*findings, *measured.values(), *of_outputs)


def _finding(where: str, anchor: str, what: str, why: str = "", code: str = "") -> results.Finding:
    link = f"{DIFFERENCES_PAGE}#{anchor}" if anchor else ""
    return results.Finding(where, what, why or WHY[anchor], link, code or CODE_OF.get(anchor, ""))


def _of_point(point: results.Point, capture: results.Capture) -> results.Finding | None:
    """Return the first known difference that explains ``point``, or that none does; None if it is alike."""
    ours, fx = point.ours.qparams, point.fx.qparams if point.fx else None
    # Their range ends at the limits of the function, so values at the limits are no saturation.
    words = point.operation.replace("(", " ").replace(".", " ").lower().split()
    is_fixed = any(word in FIXED_QPARAMS for word in words)
    if point.fx is not None and ours is not None and fx is not None:
        decibels = f"{point.ours.sqnr:.1f} dB here, {point.fx.sqnr:.1f} dB in FX"
        both = f"{qparams_text(ours)} here, {qparams_text(fx)} in FX; {decibels}"
        is_same = ours.same_qparams(fx)
        if point.kind is results.Kind.RESULT and len(ours.scales) >= 2 and len(fx.scales) <= 1:
            owner = _owner_of(fx, point, capture)
            on = f"with the qparams of {owner}" if owner else "on one set of qparams"
            what = (
                f"FX quantizes all of it {on} ({qparams_text(fx)}), {_saturation(point.fx)}, "
                f"{point.fx.sqnr:.1f} dB; here {len(ours.scales)} sets of qparams, "
                f"{_saturation(point.ours)}, {point.ours.sqnr:.1f} dB"
            )
            return _finding(point.name, "same-qparams-for-all-directions", what)
        # Equal qparams with a far worse SQNR in FX: there the input was saturated.
        gap = point.ours.sqnr - point.fx.sqnr
        if is_fixed and is_same and not gap < MUCH_DECIBELS and point.fx.sqnr < 20:
            anchor = "input-of-gates" if point.kind is results.Kind.PART else "input-of-fixed-qparams-ops"
            return _finding(point.name, anchor, decibels)
        if point.kind is results.Kind.PART and is_fixed and not is_same:
            return _finding(point.name, "tanh-of-the-cell-state", both)
        if ours.dtype == fx.dtype and not ours.is_full_range and fx.is_full_range:
            return _finding(point.name, "range-of-a-fake-quantize", both)
        if not is_same:
            is_behind = any(other.kind is results.Kind.RESULT for other in capture.points)
            is_shared = is_behind and point.operation.lower().startswith(SHARING_OPS)
            return _finding(point.name, "observer-behind-a-custom-module" if is_shared else "", both)
    elif point.fx is not None and (ours is None) != (fx is None):
        by, in_float = ("by FX", "here") if ours is None else ("here", "in FX")
        what = f"quantized {by} ({qparams_text(ours or fx)}), float {in_float}"
        return results.Finding(
            point.name, what, point.reason, f"{DIFFERENCES_PAGE}#known-differences-from-fx"
        )
    if (point.ours.saturated or 0.0) < SATURATED or is_fixed:
        return None
    also = f", in FX {_saturation(point.fx)}" if point.fx else ""
    return _finding(point.name, "moving-averages", f"{_saturation(point.ours)}{also}")


def _owner_of(qparams: results.QParamsView, point: results.Point, capture: results.Capture) -> str:
    """Return the cell whose part has these qparams on FX's side; empty if there is none."""
    module = point.name.partition("[")[0]
    for other in capture.points:
        is_inside = other.kind is results.Kind.PART and other.name.startswith(f"{module}.")
        if is_inside and other.fx and other.fx.qparams and other.fx.qparams.same_qparams(qparams):
            return other.name.rpartition(".cell.")[0] or other.name
    return ""


def _of_outputs(capture: results.Capture) -> Iterator[results.Finding]:
    """Yield the differences at the outputs."""
    for output in capture.outputs:
        if output.steps is not None and output.fx is not None and output.steps.share != 0:
            by = f"{output.steps.share:.2%} of the values differ, by {output.steps.largest:.2g} steps at most"
            worse = output.ours.sqnr < output.fx.sqnr - DECIBELS
            yield _finding(output.name, "" if worse else "rounding", by)


def _saturation(side: results.Side) -> str:
    return f"{side.saturated or 0.0:.1%} saturated"


def qparams_text(qparams: results.QParamsView | None) -> str:
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
HEADLINES = {
    results.Status.SAME: "The same as FX: at most one step apart in 99.9% of every output",
    results.Status.BETTER: "Nearer to the float model than FX",
    results.Status.SIMILAR: f"As near to the float model as FX, within {DECIBELS} dB",
    results.Status.WORSE: "Farther from the float model than FX",
}


def judge(capture: results.Capture) -> results.Verdict:
    status = _status(capture)
    nothing = capture.quantized_count == 0
    return results.Verdict(status, _headline(status, capture, nothing), find_causes(capture), nothing)


def _status(capture: results.Capture) -> results.Status:
    compared = [output for output in capture.outputs if output.fx is not None]
    if not compared:
        return results.Status.WITHOUT_FX
    steps = [output.steps for output in compared]
    if all(item is not None and item.by_two + item.by_more <= BEYOND_ONE_STEP for item in steps):
        return results.Status.SAME
    pairs = [(output.ours.sqnr, output.fx.sqnr) for output in compared if output.fx is not None]
    gains = [0.0 if ours == fx else ours - fx for ours, fx in pairs]  # Both may be infinite.
    if min(gains) < -DECIBELS:
        return results.Status.WORSE
    return results.Status.BETTER if max(gains) > DECIBELS else results.Status.SIMILAR


def _headline(status: results.Status, capture: results.Capture, nothing_quantized: bool) -> str:
    if nothing_quantized:
        return f"Nothing in {capture.model} is quantized here."
    quality = ", ".join(f"{output.name} {_whole_decibels(output)}" for output in capture.outputs)
    if status is results.Status.WITHOUT_FX:
        has_raised = capture.fx.outcome is results.FxOutcome.RAISED
        absent = "cannot run this model" if has_raised else "was not run"
        return f"FX {absent}. Against the float model: {quality}."
    return f"{HEADLINES[status]}. {quality}."


def _whole_decibels(output: results.Point) -> str:
    if output.fx is None:
        return f"{decibel_text(output.ours.sqnr)}"
    return f"{decibel_text(output.ours.sqnr)} (FX {decibel_text(output.fx.sqnr)})"


def decibel_text(sqnr: float) -> str:
    return "bit-equal" if math.isinf(sqnr) and sqnr > 0 else f"{sqnr:.1f} dB"
