"""Decisions: what was done with every module, op and part, and why; ``explain`` prints them.

A decision is a value. The stage that makes it returns it; the report only collects and shows.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

from torchq_compat.codes import said
from torchq_compat.errors import ScriptError, install_extra
from torchq_compat.support import report
from torchq_compat.support.argument_checks import INDEX, Expected, checked_arguments, instance_of, optional
from torchq_compat.support.report import fitted_width
from torchq_compat.support.user_warnings import warn_of

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


WIDTH = Expected("an int above 0", lambda value: INDEX.accepts(value) and value > 0)


class Action(StrEnum):
    """The outcome of a decision."""

    QUANTIZED = "quantized"
    SHARED = "shared"
    FLOAT = "float"
    DROPPED = "dropped"
    #: A batch norm folded into the weight of the op it follows.
    FOLDED = "folded"
    #: A dimension of an input that accepts any size, or only the size of the example.
    FREE = "free"
    FIXED = "fixed"
    #: An op that ``convert_fx`` runs on an integer kernel, or as q-dq of the reference graph.
    LOWERED = "lowered"
    REFERENCE = "reference"


#: The actions of decisions after conversion, made in addition to the decision about an op.
LOWERINGS = (Action.LOWERED, Action.REFERENCE)
#: The actions of decisions that matter, unless their reason begins with one by which nothing is lost.
TOLD = (Action.FLOAT, Action.DROPPED, Action.REFERENCE)
NOT_PREPARED = "the model has not been prepared"
ON_FLOATS = "it reuses the qparams of its input, which is float"
OF_CONSTANTS = "it computes with sizes and constants alone"
NOT_SUPPORTED = "the backend does not support its qconfig"
NOTHING_LOST = ("its qconfig is None", NOT_PREPARED, ON_FLOATS, OF_CONSTANTS)
#: The reason for an op that is part of another op's kernel.
FUSED = "runs in the kernel of the op before it"
#: The code of a decision that matters and names none.
_CODES = {
    Action.QUANTIZED: "TQ415",
    Action.SHARED: "TQ415",
    Action.FLOAT: "TQ401",
    Action.DROPPED: "TQ308",
    Action.FOLDED: "TQ401",
    Action.FREE: "TQ602",
    Action.FIXED: "TQ601",
    Action.LOWERED: "TQ413",
    Action.REFERENCE: "TQ413",
}
#: The attribute of a model without a graph that has the decisions about its modules.
MODULE_DECISIONS = "_torchq_compat_decisions"
#: How many places a warning names, the first ones.
NAMED_PLACES = 3
SHOWN_APART = ("dtype", "scale", "zero_point", "observer")


@dataclass(frozen=True)
class QuantizedValue:
    """A value that an op reads as integers and that is no other op's result: a weight, or an input quantized
    for the op.

    Attributes:
        path: the path of the op, followed by ``.weight``, ``.bias`` or ``.input``.
        role: ``weight`` if the model holds the value, ``input`` if the op is called with it.
        dtype: the integer dtype.
        scale: the scale per tensor; None if it is per channel, chosen at run time, or not known before
            conversion.
        zero_point: the zero point, or None as for ``scale``.
        channels: the number of scales; None if there is one.
        axis: the channel dimension.
        dynamic: whether scale and zero point are chosen at run time.
        spread: the least and largest integer that a dynamic value is spread over; known from conversion on.
    """

    path: str
    role: Literal["input", "weight"]
    dtype: Any = None
    scale: float | None = None
    zero_point: int | None = None
    channels: int | None = None
    axis: int | None = None
    dynamic: bool = False
    spread: tuple[int, int] | None = None

    def numbered(self, index: int) -> QuantizedValue:
        """Return the value as input ``index`` of an op with several."""
        return replace(self, path=f"{self.path}[{index}]")

    @property
    def row(self) -> report.Row:
        reason = "scale and zero point chosen at run time" if self.dynamic else ""
        if self.spread is not None:
            reason += ", over {} to {}".format(*self.spread)
        return report.Row(
            self.path,
            self.role,
            self.role,
            Action.QUANTIZED.value,
            _short(self.dtype),
            self.scale,
            self.zero_point,
            self.channels,
            reason=reason,
        )


@dataclass(frozen=True)
class Decision:
    """One decision.

    Attributes:
        path: module path, followed by the node name for an op: ``encoder.fc`` or ``encoder/add_1``.
        kind: module class, operator, or the part's formula.
        action: see ``Action``.
        reason: why; it names the setting that decided.
        details: dtype, scale and zero point if they are known.
        node: name of the graph node whose output the decision is about; empty for a module.
        warn: whether to warn, because a user who does not know the decision could be misled.
        values: the weights of the op, and the inputs that are quantized for it.
        is_part: whether the decision is about a part inside a custom module.
        unlike_fx: what FX does instead, if it gives other numbers; empty if FX does the same.
        code: the code in the register, of a decision with ``warn`` or ``unlike_fx``, and of what stays float,
            is dropped or runs as q-dq without being asked for.
    """

    path: str
    kind: str
    action: Action
    reason: str
    details: dict[str, Any] = field(default_factory=dict)
    node: str = ""
    warn: bool = False
    values: tuple[QuantizedValue, ...] = ()
    is_part: bool = False
    unlike_fx: str = ""
    code: str = ""

    def __post_init__(self) -> None:
        is_told = self.action in TOLD and not self.is_part and not self.reason.startswith(NOTHING_LOST)
        if not self.code and (self.warn or is_told):
            object.__setattr__(self, "code", _CODES[self.action])


@dataclass(frozen=True, repr=False)
class Report:
    """Decisions in the order of the model.

    Iteration, ``find`` and ``as_dicts()`` return the decisions; ``rows``, ``to_dict()`` and ``to_pandas()``
    return the rows of the printed table, which has a row for every weight and quantized input too. ``str()``
    returns that table in the width of the terminal. ``ranges`` is what the observers of a prepared model have
    seen, in the order of the model; it is empty before calibration and after conversion.
    """

    decisions: tuple[Decision, ...]
    ranges: tuple[report.ObservedRange, ...] = ()

    def __iter__(self) -> Iterator[Decision]:
        return iter(self.decisions)

    def __len__(self) -> int:
        return len(self.decisions)

    @checked_arguments(path=instance_of(str))
    def find(self, path: str) -> tuple[Decision, ...]:
        """Return the decisions about ``path`` and everything below it.

        Args:
            path: path of a module, as in ``named_modules``, or of an op: ``"module/op"``.

        Raises:
            ArgumentError: ``path`` is no str.
        """
        return tuple(
            d for d in self.decisions if d.path == path or d.path.startswith((f"{path}.", f"{path}/"))
        )

    def left_float(self) -> tuple[Decision, ...]:
        """Return the decisions about modules, ops and parts that stay float."""
        return tuple(d for d in self.decisions if d.action is Action.FLOAT)

    @property
    def rows(self) -> tuple[report.Row, ...]:
        """The rows of the table: one per decision, with what its op runs as, and one per weight and input."""
        return tuple(_rows(self.decisions))

    @property
    def summary(self) -> str:
        """The counts, in one line: ``14 quantized, 0 float, 1 batch norm folded``."""
        return report.headline(self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Return ``{"summary": ..., "rows": [...]}`` of plain values."""
        return {"summary": self.summary, "rows": [row.as_dict() for row in self.rows]}

    def to_pandas(self) -> pd.DataFrame:
        """Return a pandas table with one line for each of ``rows``.

        Raises:
            ScriptError: pandas is not installed.
        """
        return data_frame([row.as_dict() for row in self.rows], [*report.Row.__dataclass_fields__])

    def plot(self) -> Figure:
        """Return a matplotlib figure of ``ranges``: what was seen, what is covered, and the share clipped.

        Raises:
            ScriptError: matplotlib is not installed, or nothing was calibrated.
        """
        if not self.ranges:
            raise ScriptError.of("TQ974.no_ranges")
        try:
            return report.range_plot(self.ranges)
        except ModuleNotFoundError as missing:
            raise _not_installed("plot", "matplotlib", "report") from missing

    @checked_arguments(width=optional(WIDTH))
    def to_text(self, width: int | None = None) -> str:
        """Return the table as lines of text.

        Args:
            width: the columns of a line at most; None: as wide as the terminal, or 100.

        Raises:
            ArgumentError: ``width`` is no int above 0.
        """
        return report.report_text(self.rows, width or fitted_width())

    def as_dicts(self) -> list[dict[str, Any]]:
        """Return the decisions as dicts of plain values; dtypes are torch dtypes."""
        return [asdict(decision) for decision in self.decisions]

    def to_json(self) -> str:
        """Return ``as_dicts()`` as indented JSON, with dtypes as strings."""
        return json.dumps(self.as_dicts(), indent=2, default=str)

    def __str__(self) -> str:
        return self.to_text()

    def __repr__(self) -> str:
        return f"<Report: {self.summary}>"

    def _repr_html_(self) -> str:
        return report.report_html(self.rows)


def warn_of_decisions(decisions: Iterable[Decision]) -> None:
    """Warn of the decisions that could mislead, once for each code, and once of other numbers than FX."""
    alike: dict[str, dict[tuple[Action, str], list[Decision]]] = {}
    unlike_fx: dict[str, dict[str, list[Decision]]] = {}
    for decision in decisions:
        if decision.warn:
            of_code = alike.setdefault(decision.code, {})
            of_code.setdefault((decision.action, decision.reason), []).append(decision)
        elif decision.unlike_fx:
            unlike_fx.setdefault(decision.code, {}).setdefault(decision.unlike_fx, []).append(decision)
    sentences = {
        code: "; ".join(f"{_places(there)}: {what}" for what, there in places.items())
        for code, places in unlike_fx.items()
    }
    if len(sentences) > 1:
        count = sum(len(there) for places in unlike_fx.values() for there in places.values())
        lines = [f"{sentence}. [{code}]" for code, sentence in sentences.items()]
        warn_of("TQ599", "\n".join([said("TQ599", count=count, codes=", ".join(sentences)), *lines]))
    else:
        for code, sentence in sentences.items():
            warn_of(code, f"{sentence}.")
    for code, places in alike.items():
        warn_of(code, "; ".join(itertools.starmap(_outcome, places.items())) + ".")


def warned_if_nothing_is_quantized(decisions: Sequence[Decision]) -> Sequence[Decision]:
    """Return ``decisions`` with a warning for what the backend leaves float, if nothing is quantized."""
    if any(decision.action in (Action.QUANTIZED, Action.SHARED) for decision in decisions):
        return decisions
    return [
        replace(decision, warn=True) if decision.reason.startswith(NOT_SUPPORTED) else decision
        for decision in decisions
    ]


def _outcome(what: tuple[Action, str], there: Sequence[Decision]) -> str:
    action, reason = what
    verb = (("is", "are"), ("stays", "stay"))[action is Action.FLOAT][len(there) > 1]
    reason = reason.rstrip(".")
    return f"{_places(there)} {reason if action in LOWERINGS else f'{verb} {action.value}: {reason}'}"


def _places(decisions: Sequence[Decision]) -> str:
    paths: dict[str, list[str]] = {}
    for decision in decisions[:NAMED_PLACES]:
        paths.setdefault(decision.kind, []).append(repr(decision.path) if decision.path else "the model")
    named = ", ".join(f"{kind} at {', '.join(of_kind)}" for kind, of_kind in paths.items())
    more = len(decisions) - NAMED_PLACES
    return f"{named} and {more} more" if more > 0 else named


def data_frame(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> pd.DataFrame:
    """Return ``rows`` as a pandas table.

    Raises:
        ScriptError: pandas is not installed.
    """
    try:
        import pandas as pd
    except ModuleNotFoundError as missing:
        raise _not_installed("to_pandas", "pandas", "notebook") from missing
    # pandas' own integer dtype allows missing values; otherwise all values would be shown as floats.
    integers = {name: "Int64" for name in columns if name.endswith(("zero_point", "channels"))}
    return pd.DataFrame(list(rows), columns=list(columns)).astype(integers)


def _not_installed(what: str, package: str, extra: str) -> ScriptError:
    return ScriptError.of("TQ974.package", what=what, package=package, install=install_extra(extra))


def _rows(decisions: tuple[Decision, ...]) -> Iterator[report.Row]:
    known = {decision.path for decision in decisions if decision.action not in LOWERINGS}
    lowered: dict[str, list[Decision]] = {}
    alone: list[Decision] = []
    for decision in decisions:
        if decision.action in LOWERINGS:
            owner = decision.path if decision.path in known else decision.path.rpartition("/")[0]
            if owner in known and owner:
                lowered.setdefault(owner, []).append(decision)
            elif decision.reason != FUSED:
                alone.append(decision)
    for decision in decisions:
        if decision.action not in LOWERINGS:
            yield _row(decision, [item for item in lowered.get(decision.path, ()) if item.reason != FUSED])
            yield from (value.row for value in decision.values)
    yield from (_row(decision, ()) for decision in alone)


def _row(decision: Decision, lowered: Sequence[Decision]) -> report.Row:
    details = decision.details
    others = [f"{key} {_short(value)}" for key, value in details.items() if key not in SHOWN_APART]
    return report.Row(
        decision.path,
        _role(decision),
        decision.kind,
        decision.action.value,
        _short(details.get("dtype", "")),
        details.get("scale"),
        details.get("zero_point"),
        runs_as="; ".join(dict.fromkeys(entry.reason for entry in lowered)),
        on_integers=all(item.action is Action.LOWERED for item in lowered) if lowered else None,
        reason=", ".join(filter(None, (decision.reason, *others, decision.unlike_fx))),
        code=decision.code,
    )


def _role(decision: Decision) -> report.Role:
    if decision.action in (Action.FREE, Action.FIXED):
        return "size"
    if decision.action in LOWERINGS:
        return "lowering"
    if decision.action is Action.FOLDED:
        return "batch norm"
    if decision.action is Action.DROPPED:
        return "setting"
    return "part" if decision.is_part else "op"


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value).removeprefix("torch.")
