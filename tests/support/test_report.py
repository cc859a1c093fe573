"""The report of ``explain`` as a person sees it: the first line, the rows, at two widths, in a notebook."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from torch import nn
from torch.ao.quantization import get_default_qat_qconfig_mapping, get_default_qconfig_mapping

import torchq_compat as tc
from torchq_compat.errors import ScriptError
from torchq_compat.support.argument_checks import listed
from torchq_compat.support.decisions import Report
from torchq_compat.support.report import folded_prefixes


class Recognizer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(32, 5)
        self.conv, self.bn, self.relu = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()
        self.pool = nn.MaxPool2d(2)
        self.lstm = nn.LSTM(32, 16, bidirectional=True, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.pool(self.relu(self.bn(self.conv(x))))
        z, _ = self.lstm(y.permute(0, 3, 1, 2).reshape(y.shape[0], y.shape[3], 32))
        return torch.erf(self.fc(z))


X = torch.randn(2, 1, 8, 12)


@pytest.fixture(scope="module")
def reports() -> dict[str, Report]:
    torch.manual_seed(0)
    custom = tc.get_default_prepare_custom_config()
    prepared = tc.prepare_fx(Recognizer().eval(), get_default_qconfig_mapping("x86"), (X,), custom)
    prepared(X)
    return {"prepared": tc.explain(prepared), "converted": tc.explain(tc.convert_to_reference_fx(prepared))}


@pytest.mark.parametrize("stage", ["prepared", "converted"])
def test_first_what_a_person_asks(reports: dict[str, Report], stage: str) -> None:
    assert reports[stage].summary == (
        "3 quantized (24 parts inside), 3 on their input's qparams, 1 float, 1 batch norm folded"
    )
    assert str(reports[stage]).startswith(reports[stage].summary)
    assert repr(reports[stage]) == f"<Report: {reports[stage].summary}>"


def test_rows_stand_in_the_order_of_the_model(reports: dict[str, Report]) -> None:
    ops = [row.path for row in reports["converted"].rows if row.role in ("op", "batch norm")]
    assert ops == ["conv", "bn", "pool", "permute", "reshape", "lstm", "fc", "erf"]


def test_weights_and_inputs_have_rows(reports: dict[str, Report]) -> None:
    cell = "lstm.layers.0.layer_fw.cell"
    for stage, report in reports.items():
        rows = {row.path: row for row in report.rows}
        read = {row.path for row in report.rows if row.role in ("weight", "input")}
        cells = {
            f"{cell[:-7]}{way}.cell.{part}.weight" for way in ("fw", "bw") for part in ("igates", "hgates")
        }
        assert read == {"conv.input", "conv.weight", "fc.weight", *cells}
        weight = rows["conv.weight"]
        assert (weight.dtype, weight.channels, weight.scale) == ("int8", 8, None)
        assert rows["fc.weight"].channels == 5
        assert rows[f"{cell}.igates.weight"].channels == 64
        taken = rows["conv.input"]
        assert taken.dtype == "uint8"
        assert (taken.scale is None) == (stage == "prepared")
    lowest, highest = X.min().item(), X.max().item()
    assert taken.scale == pytest.approx((highest - lowest) / 127, rel=0.05)


@pytest.mark.parametrize("width", [80, 200])
def test_text_fits(reports: dict[str, Report], width: int) -> None:
    text = reports["converted"].to_text(width)
    lines = text.splitlines()
    assert max(map(len, lines[1:])) <= width
    assert lines.count("lstm.layers.0.layer_fw.cell") == lines.count("lstm.layers.0.layer_bw.cell") == 1
    (gate,) = [line for line in lines if line.startswith("  .forget_gate")][:1]
    assert gate.split() == ["." + "forget_gate", "f", "=", "sigmoid(gates[1])", "uint8", "0.00390625", "0"]
    assert [line.split() for line in lines if line.startswith("fc.weight")] == [
        ["fc.weight", "weight", "int8", "5", "scales"]
    ]
    (erf,) = [index for index, line in enumerate(lines) if line.startswith("erf")]
    assert "has no pattern for it" in (lines[erf] if width == 200 else lines[erf + 1])
    assert text.count("qconfig from global") == 2  # once for all rows, once for the custom module


def test_an_empty_column_is_left_out(reports: dict[str, Report]) -> None:
    header = [report.to_text(200).splitlines()[2].split() for report in reports.values()]
    assert header == [
        ["where", "what", "as", "scale", "note"],
        ["where", "what", "as", "scale", "zero", "note"],
    ]


def test_a_notebook_and_data(reports: dict[str, Report]) -> None:
    report = reports["converted"]
    page = report._repr_html_()
    assert page.count("<tr>") == len(report.rows) + 1
    assert report.summary.replace("'", "&#x27;") in page
    assert "<script" not in page
    data = json.loads(json.dumps(report.to_dict()))
    assert data["summary"] == report.summary
    table = report.to_pandas()
    assert list(table["path"]) == [row["path"] for row in data["rows"]] == [row.path for row in report.rows]
    assert table.set_index("path").loc["conv.weight", "channels"] == 8


def test_without_pandas(reports: dict[str, Report], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ScriptError, match=r"pip install -e '\.\[notebook\]'"):
        reports["converted"].to_pandas()


def test_a_batch_norm_in_training_is_folded_at_convert() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).train()
    prepared = tc.prepare_qat_fx(model, get_default_qat_qconfig_mapping("x86"), (X,))
    prepared(X)
    assert tc.explain(prepared).summary == "1 quantized, 0 float"
    converted = tc.convert_to_reference_fx(prepared.eval())
    assert tc.explain(converted).summary == "1 quantized, 0 float, 1 batch norm folded"
    for stage in (prepared, converted):
        (weight,) = [row for row in tc.explain(stage).rows if row.role == "weight"]
        assert (weight.path, weight.dtype, weight.channels) == ("0.weight", "int8", 4)


def test_a_lowered_op_is_one_row() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    prepared = tc.prepare_fx(model, get_default_qconfig_mapping("x86"), (torch.randn(3, 4),))
    prepared(torch.randn(16, 4))
    rows = tc.explain(tc.convert_fx(prepared)).rows
    ops = [row for row in rows if row.role == "op"]
    assert [row.path for row in ops] == ["0", "2"]
    assert {row.role for row in rows} == {"op", "input", "weight", "size"}
    assert ops[0].on_integers
    assert ops[0].runs_as == "runs as torchq_compat_native.linear.default"


def test_a_comparison_in_a_notebook() -> None:
    model, x = nn.Sequential(nn.Linear(4, 2), nn.ReLU()).eval(), torch.randn(64, 4)
    found = tc.compare(model, get_default_qconfig_mapping("x86"), (x,), [x], fx=False)
    assert repr(found) == f"<Comparison of Sequential: without FX. {found.summary}>"
    assert len(repr(found)) < 160
    page = found._repr_html_()
    assert found.summary in page
    assert page.count("<tr>") == len(found.capture.points) + len(found.capture.outputs) + 1
    assert "FX</th>" not in page
    table = found.to_pandas()
    assert list(table["name"])[:2] == ["output 0", "0"]
    assert table["sqnr"].iloc[0] == found.capture.outputs[0].ours.sqnr
    assert table["fx_sqnr"].isna().all()
    assert found.to_dict() == found.as_dict()


def test_the_ranges_of_a_calibrated_model(reports: dict[str, Report]) -> None:
    ranges = {place.path: place for place in reports["prepared"].ranges}
    part = ranges["lstm.layers.0.layer_bw.cell.gates"]
    assert part.dtype == "uint8"
    for place in ranges.values():
        step = (place.last - place.first) / 127  # the reduced range of x86
        assert place.least >= place.first - step or place.clipped
        assert place.largest <= place.last + step or place.clipped
        assert 0 <= (place.clipped or 0.0) < 0.05
    assert ranges["relu"].least == 0.0, "behind the ReLU"
    figure = reports["prepared"].plot()
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == [f"{place.path} (uint8)" for place in reports["prepared"].ranges]
    assert len(figure.axes[0].lines) == 2 * len(labels)


def test_outliers_are_clipped_and_nothing_is_plotted_without_data() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4)).eval(), torch.randn(4000, 4)
    x[0, 0] = 300.0
    prepared = tc.prepare_fx(model, get_default_qconfig_mapping("x86"), (x[:2],))
    with pytest.raises(ScriptError, match=r"no observer of the model has seen data.*\n.*after calibration"):
        tc.explain(prepared).plot()
    prepared(x)
    (place,) = (place for place in tc.explain(prepared).ranges if place.largest == 300.0)
    assert place.last < 300
    assert 0 < (place.clipped or 0) < 0.001


def test_paths_below_one_are_folded_from_three_on() -> None:
    assert folded_prefixes(["a.b", "a.c", "d"]) == [("", "a.b"), ("", "a.c"), ("", "d")]
    folded = [("a", "  .b"), ("", "  .c"), ("", "  .d"), ("", "e.f")]
    assert folded_prefixes(["a.b", "a.c", "a.d", "e.f"]) == folded


def test_a_list_of_names_says_how_many_more_there_are() -> None:
    assert listed(["a", "b"], most=2) == "a, b"
    assert listed(["a", "b", "c"], most=2) == "a, b and 1 more"
