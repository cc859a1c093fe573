"""The benchmark command: that it runs and reports its measurements; and those facts about the flows that need
no clock."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from torch import nn
from torch.ao.quantization import get_default_qconfig_mapping

import torchq_compat as tc
from tests.benchmarks.__main__ import main
from tests.benchmarks.bars import Bar, bars_table, latency_bars, lost_table
from tests.benchmarks.cases import (
    QUICK_FEEDFORWARD,
    QUICK_LOOPS,
    QUICK_RECURRENT,
    RECURRENT,
    RecurrentModel,
    random_inputs,
)
from tests.benchmarks.contenders import (
    FEEDFORWARD_CONTENDERS,
    LOOP_CONTENDERS,
    RECURRENT_CONTENDERS,
    Built,
    Contender,
    UnavailableError,
)
from tests.benchmarks.flows import FLOWS
from tests.benchmarks.latency import Effort, measure_latency
from tests.benchmarks.page import BEGIN, END, PAGE, render, write_page
from tests.benchmarks.results import SCHEMA, read_results, tables_of
from tests.benchmarks.stages import measure_stages
from tests.benchmarks.timing import Timing, measure_in_turns
from tests.helpers.oracle import MAP_LSTM, calibrate, count_nodes
from torchq_compat.annotate.observed_graph import observer_nodes

ROOT = Path(__file__).parents[2]
BRIEF = Effort(rounds=2, turn_seconds=0.0, build_limit=60.0, threads=1)


def silent(_: str) -> None:
    """Discard progress messages."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that a quick run wrote to; its page had old results."""
    folder = tmp_path_factory.mktemp("benchmarks")
    page = folder / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    main(["--quick", "--threads", "1", "--output", str(folder / "out"), "--page", str(page)])
    return folder


@pytest.fixture(scope="module")
def results(written: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((written / "out" / "benchmarks.json").read_text())
    return found


@pytest.mark.slow
def test_results_keep_to_the_schema(results: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(results, SCHEMA)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**results, "host": "name"}, SCHEMA)


@pytest.mark.slow
def test_every_flow_and_contender_has_a_row_and_a_line(results: dict[str, Any]) -> None:
    assert [row["flow"] for row in results["stages"]] == list(FLOWS)
    tables = {table.title: table.as_markdown() for table in tables_of(results)}
    groups = (
        ("recurrent", ((QUICK_RECURRENT, RECURRENT_CONTENDERS), (QUICK_LOOPS, LOOP_CONTENDERS))),
        ("feedforward", ((QUICK_FEEDFORWARD, FEEDFORWARD_CONTENDERS),)),
    )
    for part, pairs in groups:
        expected = [
            (recipe.name, contender.name)
            for recipes, contenders in pairs
            for recipe in recipes
            for contender in contenders
        ]
        assert [(row["case"], row["contender"]) for row in results[part]] == expected
        for case, contender in expected:
            assert f"\n| {contender} |" in tables[case]


@pytest.mark.slow
def test_contenders_that_need_nothing_extra_are_measured(results: dict[str, Any]) -> None:
    rows = [*results["recurrent"], *results["feedforward"]]
    assert {row["contender"] for row in rows if "unavailable" in row} <= {
        "ours, lowered",
        "ours, lowered on AVX-VNNI",
        "ours, lowered on AVX2",
        "ours, ExecuTorch portable",
        "ours, ExecuTorch XNNPACK",
        "ours, ONNX Runtime",
        "ONNX Runtime, float",
        "ONNX Runtime, dynamic int8",
        "OpenVINO, float",
        "OpenVINO, int8",
    }
    measured = [row for row in rows if "unavailable" not in row]
    in_floats = [row for row in measured if "float" in row["contender"] and "bfloat" not in row["contender"]]
    assert {row["verdict"] for row in in_floats} == {"float"}
    others = [row for row in measured if row not in in_floats and "bf" not in row["contender"]]
    # The few numbers from a loop of two steps do not measure noise.
    others = [row for row in others if "LSTMCell" not in row["case"]]
    assert {row["verdict"] for row in others} == {"quantized"}


@pytest.mark.slow
def test_the_page_has_the_tables_and_keeps_its_prose(written: Path, results: dict[str, Any]) -> None:
    text = (written / "page.md").read_text()
    assert text.startswith(f"before\n{BEGIN}\n")
    assert text.endswith(f"\n{END}\nafter\n")
    assert "old" not in text.splitlines()
    for table in tables_of(results):
        assert table.as_markdown() in text
    for name in ("benchmarks.svg", "benchmarks.json"):
        assert (written / name).read_bytes() == (written / "out" / name).read_bytes()


@pytest.mark.slow
def test_the_page_is_made_again_from_the_numbers(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = written / "page.md"
    before, plot = page.read_text(), (written / "benchmarks.svg").read_bytes()
    numbers = str(written / "out" / "benchmarks.json")
    main(["--results", numbers, "--output", str(written / "again"), "--page", str(page)])
    assert page.read_text() == before
    assert (written / "again" / "benchmarks.svg").read_bytes() == plot
    assert "Prepare, calibrate, convert" in capsys.readouterr().out


def test_the_page_of_this_repository_says_what_its_numbers_say() -> None:
    numbers = read_results(ROOT / PAGE.with_suffix(".json"))
    assert f"{BEGIN}\n\n{render(numbers, 'benchmarks.svg')}\n\n{END}" in (ROOT / PAGE).read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--page", "page.md", "--only", "b"], "--page needs all three parts"),
        (["--page", "missing.md"], "missing.md"),
        (["--page", "prose.md"], "prose.md has no"),
        (["--threads", "0"], "must be 1 or more"),
    ],
)
def test_bad_options_are_refused_before_measuring(
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prose.md").write_text("prose")
    with pytest.raises(SystemExit, match="2"):
        main([*options, "--output", "out"])
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("left_out", "text", "message"),
    [
        ("recurrent", f"{BEGIN}{END}", "missing: recurrent"),
        (None, f"{BEGIN} and no end", "page.md has no"),
        (None, "neither", "page.md has no"),
    ],
)
def test_a_page_that_cannot_be_written_stays(
    left_out: str | None, text: str, message: str, tmp_path: Path
) -> None:
    results = read_results(PAGE.with_name("benchmarks.json"))
    page = tmp_path / "page.md"
    page.write_text(text)
    partial = {name: value for name, value in results.items() if name != left_out}
    with pytest.raises(ValueError, match=message):
        write_page(partial, page, "plot.svg")
    assert page.read_text() == text
    assert list(tmp_path.iterdir()) == [page]


def measured_alone(build: Callable[..., Built], *, limit: float = 60.0) -> dict[str, Any]:
    """Return the row of a single contender that claims to be quantized."""
    effort = Effort(BRIEF.rounds, BRIEF.turn_seconds, limit, BRIEF.threads)
    (row,) = measure_latency(QUICK_FEEDFORWARD, [Contender("it", build)], effort, silent)
    return row


def test_speed_without_quantization_is_told() -> None:
    def unquantized(case: Any) -> Built:
        return Built(case.model, 1)

    assert measured_alone(unquantized)["verdict"] == "too good: nothing was quantized"


def test_speed_without_the_right_result_is_told() -> None:
    def zeros(case: Any) -> Built:
        return Built(lambda x: torch.zeros_like(case.expected), 1)

    assert measured_alone(zeros)["verdict"] == "too bad"


def test_a_contender_that_cannot_be_built_says_why() -> None:
    def missing(case: Any) -> Built:
        raise UnavailableError("it is not installed")

    def broken(case: Any) -> Built:
        raise KeyError("a lost key")

    def slow(case: Any) -> Built:
        while True:
            time.sleep(0.01)

    assert measured_alone(missing)["unavailable"] == "it is not installed"
    assert measured_alone(broken)["unavailable"] == "KeyError: 'a lost key'"
    assert measured_alone(slow, limit=0.05)["unavailable"] == "not ready after 0.05 s"


def test_a_flow_that_takes_too_long_has_a_limit_and_no_number() -> None:
    rows = measure_stages([8], rounds=2, repeats=1, limit=0.05, tell=silent)
    assert rows == [{"flow": flow, "length": 8, "limit_s": 0.05} for flow in FLOWS]


def test_contenders_take_turns() -> None:
    order: list[str] = []
    timings = measure_in_turns(
        {"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=3, turn_seconds=0.0
    )
    assert "".join(order) == "ab" + "ab" + "ba" + "ab"
    assert [timing.turns for timing in timings.values()] == [3, 3]


def test_a_timing_is_median_and_quartiles() -> None:
    assert Timing.of([0.005, 0.001, 0.002, 0.003, 0.004]) == Timing(3.0, 2.0, 4.0, 5)
    assert Timing.of([0.001]) == Timing(1.0, 1.0, 1.0, 1)


def test_a_missed_expectation_and_a_faster_peer_are_shown() -> None:
    assert [row[-1] for row in bars_table([Bar("a", 1.0, 1.0), Bar("b", 1.01, 1.0)]).rows] == [
        "met",
        "missed",
    ]
    times = {"float": 3.0, "FX static": 1.0, "ours, reference": 9.0, "ours, lowered": 2.0}
    rows = [{"case": "it", "contender": name, "median_ms": ms} for name, ms in times.items()]
    assert lost_table(rows).rows == (("it", "ours, lowered", "FX static", "2.00"),)


def test_one_step_and_loops_have_expectations_of_their_own() -> None:
    times = {"float": 1.0, "FX static": 2.0, "ONNX Runtime, dynamic int8": 1.0, "ours, lowered": 1.5}
    cases = {"(64, 64, 1, 1, 1), 2 threads": 64, "LSTMCell, 2 steps, hidden 8": None}
    rows = [
        {"case": case, "contender": name, "median_ms": ms, "hidden": hidden}
        for case, hidden in cases.items()
        for name, ms in times.items()
    ]
    bars = latency_bars(rows, [])
    assert [(bar.measured, bar.limit, bar.is_met) for bar in bars] == [
        (0.75, 1.0, True),
        (1.5, 2.0, True),
        (1.5, 1.2, False),
    ]
    assert {recipe.name for recipe in RECURRENT} >= {"(64, 64, 1, 1, 1)", "GRU (256, 512, 2, 1, 1)"}


def counts_prepared_at(length: int) -> dict[str, int]:
    """Return the numbers of nodes and observers of the flows' model, prepared at ``length`` and calibrated
    with four steps."""
    torch.manual_seed(0)
    lstm = nn.LSTM(8, 8, 2, bidirectional=True)
    model = RecurrentModel(lstm, nn.Linear(16, 4)).eval()
    mapping = get_default_qconfig_mapping("x86")
    prepared = tc.prepare_fx(model, mapping, random_inputs(lstm, length, 2), MAP_LSTM)
    calibrate(prepared, [random_inputs(lstm, 4, 2)])
    graphs = [m for m in prepared.modules() if isinstance(m, torch.fx.GraphModule)]
    return {
        "observers": sum(1 for graph in graphs for _ in observer_nodes(graph)),
        "prepared": count_nodes(prepared),
        "converted": count_nodes(tc.convert_to_reference_fx(prepared)),
    }


def test_what_prepare_and_convert_do_does_not_depend_on_the_length() -> None:
    short = counts_prepared_at(8)
    assert short == counts_prepared_at(256)
    # 14 in each of 4 cells: 7 parts with calibrated ranges, 5 with fixed ones, 2 weights. The other 5: the
    # input, both states, and the weight and output of the linear.
    assert short["observers"] == 4 * 14 + 5
