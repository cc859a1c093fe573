"""The results of a comparison, as frozen plain values: no tensors, no modules, nothing that needs torch.

SQNR is the signal to quantization noise ratio against the float model in dB, infinite if bit-equal. Shares
are between 0 and 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """The kind of a point."""

    OUTPUT = "output"
    MODULE = "module"
    OP = "op"
    RESULT = "result"
    PART = "part"


class Status(StrEnum):
    """The verdict in one word."""

    SAME = "same"
    BETTER = "better"
    SIMILAR = "similar"
    WORSE = "worse"
    WITHOUT_FX = "without FX"


class FxOutcome(StrEnum):
    """The outcome of FX's side."""

    RAN = "ran"
    RAISED = "raised"
    NOT_ASKED = "not asked"


@dataclass(frozen=True)
class QParamsView:
    """Quantization parameters; if they are per channel, each distinct pair of scale and zero point is listed
    once."""

    dtype: str
    scales: tuple[float, ...]
    zero_points: tuple[int, ...]
    quant_min: int
    quant_max: int

    @property
    def is_full_range(self) -> bool:
        """Whether the range is that of the dtype."""
        bits = int(self.dtype.lstrip("uint"))
        low = 0 if self.dtype.startswith("u") else -(2 ** (bits - 1))
        return (self.quant_min, self.quant_max) == (low, low + 2**bits - 1)

    def same_qparams(self, other: QParamsView) -> bool:
        """Return whether dtypes, ranges and zero points are equal, and scales equal in float32 precision."""
        return (
            (self.dtype, self.quant_min, self.quant_max) == (other.dtype, other.quant_min, other.quant_max)
            and self.zero_points == other.zero_points
            and len(self.scales) == len(other.scales)
            and all(abs(a - b) <= 1e-6 * abs(a) for a, b in zip(self.scales, other.scales, strict=True))
        )


@dataclass(frozen=True)
class Side:
    """One engine at one point.

    Attributes:
        qparams: the qparams; None if the value is float.
        sqnr: SQNR against the float model, in dB.
        saturated: share of the float model's values more than half a step outside the range; None if the
            value is float.
    """

    qparams: QParamsView | None
    sqnr: float
    saturated: float | None


@dataclass(frozen=True)
class Steps:
    """The differences between FX's values and ours at one point, in quantization steps.

    Attributes:
        size: the size of one step.
        share: share of values that differ by half a step or more.
        by_one, by_two, by_more: shares of values that differ by one, two and more steps, rounded.
        largest: the largest difference, in steps.
        from_range: whether the point is float, so that a step is 1/255 of the float model's range.
    """

    size: float
    share: float
    by_one: float
    by_two: float
    by_more: float
    largest: float
    from_range: bool


@dataclass(frozen=True)
class Histogram:
    """The float model's values at a point: ``counts`` in equal bins from ``low`` to ``high``."""

    low: float
    high: float
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Point:
    """One place of the model.

    Attributes:
        name: module path, ``scope/op`` for an op, ``path[i]`` for result i of a custom module, ``path.part``
            for a part of it, ``output i``.
        operation: class, operator or formula.
        reason: why the place is quantized or float on our side.
        fx: FX's side; None if FX did not run or has no value of that name.
        steps: the differences; None if there is nothing to compare with.
    """

    name: str
    kind: Kind
    operation: str
    reason: str
    ours: Side
    fx: Side | None
    steps: Steps | None
    histogram: Histogram | None


@dataclass(frozen=True)
class CellNode:
    """A part of a cell, or an input of the cell; ``inputs`` are the names that the part reads."""

    name: str
    formula: str
    inputs: tuple[str, ...]


@dataclass(frozen=True)
class CellGraph:
    """The parts of one cell in the order of computation; the point of a part is ``path.name``."""

    path: str
    nodes: tuple[CellNode, ...]


@dataclass(frozen=True)
class Explained:
    """What ``explain`` says of a module or op: that it stays float, or what FX does otherwise."""

    path: str
    kind: str
    reason: str
    code: str = ""

    @property
    def why(self) -> str:
        return f"{self.reason} [{self.code}]" if self.code else self.reason


@dataclass(frozen=True)
class Series:
    """One output channel along ``axis``, where the sides differ most."""

    output: str
    axis: str
    where: str
    exact: tuple[float, ...]
    ours: tuple[float, ...]
    fx: tuple[float, ...] | None


@dataclass(frozen=True)
class Costs:
    """Bytes of state, and milliseconds of one call with the example inputs, for each side; None if FX has
    none."""

    float_bytes: int
    our_bytes: int
    fx_bytes: int | None
    float_ms: float
    our_ms: float
    fx_ms: float | None


@dataclass(frozen=True)
class FxRun:
    """The outcome of FX's side.

    Attributes:
        outcome: whether it ran.
        error: the exception it raised.
        lowering_error: the exception of its ``convert_fx`` if the reference conversion worked.
    """

    outcome: FxOutcome
    error: str = ""
    lowering_error: str = ""


@dataclass(frozen=True)
class Capture:
    """Everything measured about one model.

    Attributes:
        quantized_count: the number of modules and ops that this package quantizes, including dynamic and
            weight-only.
    """

    model: str
    outputs: tuple[Point, ...]
    points: tuple[Point, ...]
    cells: tuple[CellGraph, ...]
    left_float: tuple[Explained, ...]
    unlike_fx: tuple[Explained, ...]
    quantized_count: int
    series: tuple[Series, ...]
    costs: Costs
    fx: FxRun


@dataclass(frozen=True)
class Finding:
    """A difference: where, what and why; ``link`` leads into the guide, and ``code`` into the register: both
    are empty if they do not explain it."""

    where: str
    what: str
    why: str
    link: str
    code: str = ""


@dataclass(frozen=True)
class Verdict:
    status: Status
    headline: str
    findings: tuple[Finding, ...]
    nothing_quantized: bool = False

    @property
    def needs_attention(self) -> bool:
        """Whether something got worse, or nothing was quantized."""
        return self.status is Status.WORSE or self.nothing_quantized


@dataclass(frozen=True)
class ComparedModel:
    """FX and this package on one model: the measurements and the verdict."""

    capture: Capture
    verdict: Verdict


@dataclass(frozen=True)
class Target:
    """A script with its arguments, or ``module:function``.

    Attributes:
        fx: "yes", "no" or "auto".
        trained_qparams: whether trained models convert with the qparams they trained with, not with FX's.
    """

    name: str
    is_function: bool
    args: Sequence[str] = ()
    fx: str = "auto"
    trained_qparams: bool = False
