"""The zoo of public models: two small ones here, all of them with ``-m slow``, and the verdicts."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tests.zoo.explained import EXPLAINED
from tests.zoo.measure import measure
from tests.zoo.page import render
from tests.zoo.processes import row_of
from tests.zoo.registry import ZOO
from tests.zoo.verdict import KINDS, is_good, problems, verdict

GUIDE = Path(__file__).parents[2] / "migration"
LIBRARIES = {"torchvision", "timm", "transformers"}
MISSING = {name for name in LIBRARIES if importlib.util.find_spec(name) is None}


@pytest.fixture(scope="module")
def dlrm() -> dict[str, Any]:
    return measure(ZOO["dlrm"])


def runnable() -> list[str]:
    """Return the models whose library is installed; the extra ``zoo`` installs all."""
    return [name for name, entry in ZOO.items() if entry.source.split(".")[0] not in MISSING]


@pytest.mark.slow
@pytest.mark.parametrize("name", runnable())
def test_model_of_the_zoo(name: str) -> None:
    """The model matches FX, is near float, is refused with a hint, or has its reason; at other sizes too."""
    row = row_of(name, 600.0)
    assert is_good(row), verdict(row)


def test_embedding_bags_as_fx(dlrm: dict[str, Any]) -> None:
    assert verdict(dlrm) == "as FX"
    assert dlrm["ops"]["ours"] == dlrm["ops"]["fx"] >= 5
    assert dlrm["ours"]["sqnr"]["reference"]["dB"] < 60.0  # something was quantized


def test_fx_is_as_the_committed_results_have_it(dlrm: dict[str, Any]) -> None:
    """Where torch has no FX the stored results are compared; here both FX and our results are."""
    rows = {row["model"]: row for row in json.loads((GUIDE / "zoo.json").read_text())["rows"]}
    stored = rows["dlrm"]
    for form in ("reference", "lowered"):
        of_fx = stored["fx"]["sqnr"][form]["dB"]
        assert 15.0 < of_fx < 60.0
        assert dlrm["fx"]["sqnr"][form]["dB"] == pytest.approx(of_fx, abs=0.1)
        assert dlrm["ours"]["sqnr"][form]["dB"] == pytest.approx(of_fx, abs=0.5)
    assert dlrm["ops"]["fx"] == stored["ops"]["fx"]


def test_recurrent_model_near_float() -> None:
    row = measure(ZOO["kws_gru"])
    assert is_good(row), verdict(row)
    assert 25.0 < row["ours"]["sqnr"]["reference"]["dB"] < 60.0


#: What is wrong in a row: its place, its value, and the kind of problem that it is.
WRONG: list[tuple[str, Any, str]] = [
    ("prepared.dB", 40.0, "prepared"),
    ("ours.sqnr.reference", {"dB": 5.0}, "below_fx"),
    ("ours.sqnr.lowered", {"dB": 12.0}, "lowered"),
    ("ops.only_fx", ["fc"], "ops"),
    ("contradictions", ["fc/linear"], "told"),
    ("other_sizes.batch 1.prepared", {"dB": 30.0}, "sizes"),
    ("other_sizes.bag 2.lowered", {"dB": 3.0}, "sizes"),
    ("other_sizes.batch 1.lowered", {"crashed": "RuntimeError: shape"}, "sizes"),
    ("other_sizes.batch 1.lowered", {"refused": "another size"}, "sizes"),
    ("ours.refused", "cannot be captured", "hint"),
    ("ours.crashed", "prepare: KeyError", "crashed"),
    ("died", "exit status -11", "died"),
]


def test_verdict_sees(dlrm: dict[str, Any], subtests: pytest.Subtests) -> None:
    for path, value, kind in WRONG:
        with subtests.test(path=path, value=value):
            row = copy.deepcopy(dlrm)
            *above, last = path.split(".")
            place = row
            for name in above:
                place = place[name]
            place[last] = value
            assert kind in dict(problems(row))
            assert verdict(row).startswith("FAIL")


def test_below_15_db_qparams_are_the_measure(dlrm: dict[str, Any]) -> None:
    row = copy.deepcopy(dlrm)
    row["fx"]["sqnr"] = row["ours"]["sqnr"] = {"reference": {"dB": 8.0}, "lowered": {"dB": 8.0}}
    row["other_sizes"] = {}
    assert verdict(row) == "as FX"
    row["qparams"]["equal"] -= 1
    assert set(dict(problems(row))) == {"qparams"}


def test_explanations_are_of_models_and_kinds_that_are() -> None:
    assert EXPLAINED.keys() <= ZOO.keys()
    assert {kind for reasons in EXPLAINED.values() for kind in reasons} <= KINDS


def test_page_is_of_the_committed_results() -> None:
    results = json.loads((GUIDE / "zoo.json").read_text())
    assert sorted([row["model"] for row in results["rows"]] + results["not_measured"]) == sorted(ZOO)
    assert all(row["commit"] for row in results["rows"])
    assert (GUIDE / "zoo.md").read_text() == render(results)


def test_no_explanation_is_left_over() -> None:
    """Each explanation belongs to a shortfall in the committed results."""
    rows = {row["model"]: row for row in json.loads((GUIDE / "zoo.json").read_text())["rows"]}
    left_over = {
        (name, kind)
        for name, reasons in EXPLAINED.items()
        for kind in reasons
        if name in rows and kind not in dict(problems(rows[name]))
    }
    assert left_over == set()
