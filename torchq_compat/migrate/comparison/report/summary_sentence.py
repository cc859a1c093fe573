"""A comparison in words and numbers: how near to float, how small, how fast, and the outcome of FX."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from torchq_compat.migrate.comparison.results import (
    Capture,
    ComparedModel,
    FxOutcome,
    Kind,
    Point,
    QParamsView,
    Side,
)

__all__ = ["GRADES", "Place", "grade", "noise_text", "summary_sentence", "told_places", "worst_places"]

#: (least SQNR in dB, grade). At 40 dB the noise is 1% of the signal, at 20 dB 10%.
GRADES = ((30.0, "good"), (20.0, "fair"), (-math.inf, "poor"))
#: From this share of values outside the range on, saturation explains the noise.
MUCH_SATURATED = 0.002
#: A place whose SQNR is less than this many dB below its input's has inherited the noise.
INHERITED = 3.0
#: Below this share, values use little of the range.
LITTLE = 0.35


def grade(sqnr: float) -> str:
    """Return ``exact``, ``good``, ``fair`` or ``poor``."""
    if math.isinf(sqnr) and sqnr > 0:
        return "exact"
    return next((word for least, word in GRADES if sqnr >= least), "poor")


def noise_text(sqnr: float) -> str:
    """Return the noise as a share of the signal, both as root mean square."""
    if math.isinf(sqnr) and sqnr > 0:
        return "0%"
    share = 10 ** (-sqnr / 20)
    return f"{share:.2%}" if share < 0.01 else f"{share:.1%}" if share < 0.1 else f"{share:.0%}"


def summary_sentence(comparison: ComparedModel) -> str:
    """Return a sentence such as ``int8 within 0.9% of float; 0.27 of the size; 3.1 times as fast. FX cannot
    run this model because ...``"""
    capture, costs = comparison.capture, comparison.capture.costs
    if comparison.verdict.nothing_quantized:
        return f"Nothing is quantized. {_of_fx(capture)}"
    ours = _numbers([output.ours for output in capture.outputs], costs.our_bytes, costs.our_ms, capture)
    return f"{_bits(capture)} {ours}. {_of_fx(capture)}"


def _numbers(sides: Sequence[Side], size: int, time: float, capture: Capture) -> str:
    costs = capture.costs
    lowest = min((side.sqnr for side in sides), default=math.inf)
    told = ["equal to float" if grade(lowest) == "exact" else f"within {noise_text(lowest)} of float"]
    if costs.float_bytes:
        told.append(f"{size / costs.float_bytes:.2f} of the size")
    ratio = costs.float_ms / time
    told.append(f"{ratio:.1f} times as fast" if ratio >= 1 else f"{1 / ratio:.1f} times as slow")
    return "; ".join(told)


def _bits(capture: Capture) -> str:
    dtypes = {p.ours.qparams.dtype for p in (*capture.outputs, *capture.points) if p.ours.qparams}
    widths = {dtype.lstrip("uint") for dtype in dtypes}
    return "int8" if widths == {"8"} else f"{'- and '.join(sorted(widths))}-bit" if widths else "quantized"


def _of_fx(capture: Capture) -> str:
    fx, costs = capture.fx, capture.costs
    if fx.outcome is FxOutcome.NOT_ASKED:
        return "FX was not run."
    if fx.outcome is FxOutcome.RAISED:
        return f"FX cannot run this model because of {_first_line(fx.error)}"
    sides = [output.fx for output in capture.outputs if output.fx is not None]
    if costs.fx_bytes is None or costs.fx_ms is None or not sides:
        why = f" because of {_first_line(fx.lowering_error)}" if fx.lowering_error else "."
        return f"FX's convert_fx does not work on this model{why}"
    return f"FX: {_numbers(sides, costs.fx_bytes, costs.fx_ms, capture)}."


def _first_line(error: str) -> str:
    line = error.strip().split("\n", 1)[0]
    return line if line.endswith(".") else f"{line}."


class Place:
    """Points with the same values everywhere, shown once."""

    def __init__(self, point: Point) -> None:
        self.point = point
        self.names = [point.name]

    def takes(self, other: Point) -> bool:
        """Return whether ``other`` has the same value, moved or passed on."""
        mine = self.point
        same = (other.ours, other.fx, other.histogram) == (mine.ours, mine.fx, mine.histogram)
        return same and other.kind is not Kind.PART and mine.kind is not Kind.PART


def told_places(points: Sequence[Point]) -> list[Place]:
    """Return the places in order, each value once: a pooling that passes integers on is not a place of its
    own."""
    found: list[Place] = []
    for point in points:
        if found and found[-1].takes(point):
            found[-1].names.append(point.name)
        else:
            found.append(Place(point))
    return found


def worst_places(capture: Capture, count: int = 3) -> list[tuple[Place, str]]:
    """Return the places farthest from float, with the reason for each."""
    places = told_places(capture.points)
    noisy = [place for place in places if grade(place.point.ours.sqnr) != "exact"]
    worst = sorted(noisy, key=lambda place: place.point.ours.sqnr)[:count]
    return [(place, " ".join(_reasons(place.point, capture))) for place in worst]


def _reasons(point: Point, capture: Capture) -> Iterator[str]:
    side, qparams, histogram = point.ours, point.ours.qparams, point.histogram
    if qparams is None:
        yield "It is computed in float: the noise comes from its input."
        return
    if side.saturated is not None and side.saturated > MUCH_SATURATED:
        yield (
            f"{side.saturated:.1%} of float's values lie outside the range that it covers; calibrate with "
            "data that has them, or take an observer with a wider range."
        )
    if histogram is not None and len(qparams.scales) == 1:
        used = (histogram.high - histogram.low) / _width(qparams)
        if used < LITTLE:
            yield f"Float's values fill {used:.0%} of the range that it covers: few steps are left for them."
    before = _before(point, capture)
    if before is not None and side.sqnr > before.ours.sqnr - INHERITED:
        yield f"The noise comes from its input: {before.name} has {before.ours.sqnr:.1f} dB."
    elif len(qparams.scales) == 1:
        yield f"The noise is its own: one step is {qparams.scales[0]:.3g}."
    else:
        yield f"It has {len(qparams.scales)} sets of qparams; the noise comes from the parts they belong to."


def _width(qparams: QParamsView) -> float:
    return (qparams.quant_max - qparams.quant_min) * qparams.scales[0]


def _before(point: Point, capture: Capture) -> Point | None:
    """Return the noisiest of the parts that a part reads, or the quantized place before an op; None if there
    is none."""
    for cell in capture.cells:
        for node in cell.nodes:
            if f"{cell.path}.{node.name}" == point.name:
                read = {f"{cell.path}.{name}" for name in node.inputs}
                found = [p for p in capture.points if p.name in read]
                return min(found, key=lambda p: p.ours.sqnr, default=None)
    earlier = capture.points[: capture.points.index(point)]
    return next((p for p in reversed(earlier) if p.kind is not Kind.PART and p.ours.qparams), None)
