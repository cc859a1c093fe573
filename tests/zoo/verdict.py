"""The meaning of a row: as FX, near float, refused with a hint, or how it falls short."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tests.zoo.explained import EXPLAINED
from tests.zoo.measure import OWN_SIZE

__all__ = ["beside_plain_loops", "is_good", "problems", "size_word", "verdict"]

Row = Mapping[str, Any]

#: Least SQNR in dB of prepared against float: rounding only, and with a folded batch norm.
PREPARED, PREPARED_FOLDED = 80.0, 60.0
#: From this SQNR on FX is a measure; a model without such a measure is called near float.
MEANINGFUL = 15.0
BELOW_FX = 1.0
#: At another, uncalibrated size, relative to the own size: both over several unseen batches.
BELOW_AT_OTHER_SIZE = 6.0
LOWERED_BELOW_REFERENCE = 2.0
#: Relative to plain loops, and the least wherever plain loops reach it.
BELOW_LOOPS, LEAST = 1.0, 25.0


def verdict(row: Row) -> str:
    """Return a few words; those of a failure begin with FAIL."""
    found = dict(problems(row))
    reasons = EXPLAINED.get(row["model"], {})
    failures = [text for kind, text in found.items() if kind not in reasons]
    if failures:
        return "FAIL: " + "; ".join(failures)
    words = "refused, with a hint" if "refused" in row.get("ours", {}) else _measured_words(row)
    given = list(dict.fromkeys(reasons[kind] for kind in found))
    return f"{words}; {' '.join(given)}" if given else words


def is_good(row: Row) -> bool:
    return not verdict(row).startswith("FAIL")


def problems(row: Row) -> Iterator[tuple[str, str]]:
    """Yield (kind, what falls short), each kind at most once."""
    if "died" in row:
        yield "died", row["died"]
        return
    ours = row["ours"]
    if "crashed" in ours:
        yield "crashed", f"crash in {ours['crashed']}"
    elif "refused" in ours:
        if "Hint:" not in ours["refused"]:
            yield "hint", "refused without a hint"
    else:
        yield from _of_results(row)
        yield from _of_sizes(row)
        yield from _of_loops(row)
    extra = set(EXPLAINED.get(row["model"], {})) - KINDS
    assert not extra, f"no such kind: {extra}"


KINDS = {
    "died",
    "crashed",
    "hint",
    "prepared",
    "sizes",
    "lowered",
    "below_fx",
    "qparams",
    "ops",
    "float",
    "told",
    "loops",
}


def _of_results(row: Row) -> Iterator[tuple[str, str]]:
    prepared = row["prepared"].get("dB", 0.0)
    if prepared < _prepared_bar(row):
        yield "prepared", f"prepared differs from float: {prepared:.0f} dB"
    ours, theirs = row["ours"]["sqnr"], row["fx"]["sqnr"]
    reference, lowered = _number(ours["reference"]), _number(ours["lowered"])
    if row["contradictions"]:
        yield "told", f"explain: float and lowered at once: {', '.join(row['contradictions'][:3])}"
    if reference >= MEANINGFUL and lowered < reference - LOWERED_BELOW_REFERENCE:
        yield "lowered", f"lowered {lowered:.1f} dB, reference {reference:.1f}"
    if not _has_measure(row):
        if reference < MEANINGFUL:
            yield "float", f"far from float: {reference:.1f} dB"
        return
    ops, qparams = row["ops"], row["qparams"]
    if ops["only_fx"] or ops["only_ours"]:
        yield "ops", f"other ops quantized: {_few('-', ops['only_fx'])} {_few('+', ops['only_ours'])}"
    if _number(theirs["reference"]) >= MEANINGFUL:
        short = [
            f"{form} {_number(ours[form]):.1f} dB, FX {_number(theirs[form]):.1f}"
            for form in ("reference", "lowered")
            if _number(ours[form]) < _number(theirs[form]) - BELOW_FX
        ]
        if short:
            yield "below_fx", "below FX: " + ", ".join(short)
    elif qparams["equal"] < qparams["fx"] or qparams["ours"] > qparams["fx"]:
        yield "qparams", f"qparams: {qparams['equal']} of {qparams['fx']} equal"


def _of_sizes(row: Row) -> Iterator[tuple[str, str]]:
    wrong = [f"{name}: {word}" for name in row["other_sizes"] if (word := size_word(row, name)) not in RIGHT]
    if wrong:
        yield "sizes", "; ".join(wrong)


def beside_plain_loops(row: Row) -> dict[str, tuple[float, float]]:
    """Return the dB of the reference and of plain loops, for every size at which both run."""
    pairs = {}
    for name, loops in row.get("plain_loops", {}).items():
        found = row["own_size"] if name == OWN_SIZE else row["other_sizes"][name]
        if "dB" in loops and "dB" in found["reference"]:
            pairs[name] = (found["reference"]["dB"], loops["dB"])
    return pairs


def _of_loops(row: Row) -> Iterator[tuple[str, str]]:
    short = [
        f"{name}: {here:.1f} dB, plain loops {there:.1f}"
        for name, (here, there) in beside_plain_loops(row).items()
        if here < there - BELOW_LOOPS or here < LEAST <= there
    ]
    if short:
        yield "loops", "; ".join(short)


RIGHT = ("right", "refused", "float fails")


def size_word(row: Row, name: str) -> str:
    """Return the outcome at the size ``name``."""
    given = row["other_sizes"][name]
    if not given or "float_fails" in given.get("prepared", {}):
        return "float fails"
    for form in ("prepared", "reference", "lowered"):
        if "crashed" in given[form]:
            return f"{form} crashes, {given[form]['crashed'][:100]}"
    if any("refused" in given[form] for form in ("prepared", "reference", "lowered")):
        hints = [given[form].get("refused", "Hint:") for form in ("prepared", "reference", "lowered")]
        return "refused" if all("Hint:" in text for text in hints) else "refused without a hint"
    prepared, reference, lowered = (given[form]["dB"] for form in ("prepared", "reference", "lowered"))
    if prepared < _prepared_bar(row):
        return f"wrong, prepared {prepared:.0f} dB"
    # Rows of earlier runs have only the two batches of the own size.
    own = row.get("own_size", row["ours"]["sqnr"])
    measure = min(_number(own["reference"]), given.get("fx_reference", {}).get("dB", 999.0))
    if reference < measure - BELOW_AT_OTHER_SIZE:
        return f"wrong, reference {reference:.1f} dB"
    if reference >= MEANINGFUL and lowered < reference - BELOW_AT_OTHER_SIZE:
        return f"wrong, lowered {lowered:.1f} dB"
    return "right"


def _measured_words(row: Row) -> str:
    if not _has_measure(row):
        return "near float"
    return "as FX" if row["qparams"]["equal"] == row["qparams"]["fx"] else "as near as FX"


def _has_measure(row: Row) -> bool:
    """Return whether FX ran and quantized the recurrent modules."""
    theirs = row["fx"]
    return "refused" not in theirs and not theirs["float_recurrent"]


def _prepared_bar(row: Row) -> float:
    return PREPARED_FOLDED if row["batch_norm"] else PREPARED


def _number(measured: Mapping[str, Any]) -> float:
    """Return the measured dB; far below all bars if the model did not run."""
    return float(measured.get("dB", -999.0))


def _few(sign: str, names: list[str]) -> str:
    shown = ", ".join(names[:2])
    return f"{sign}{len(names)} ({shown}{', ...' if len(names) > 2 else ''})" if names else f"{sign}0"
