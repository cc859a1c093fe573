"""What stays float, or has no effect, is reported: by a warning at the user's line and in ``explain``."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import (
    MinMaxObserver,
    QConfig,
    QConfigMapping,
    default_dynamic_qconfig,
    default_weight_observer,
    float_qparams_weight_only_qconfig,
)
from torch.fx import GraphModule

import torchq_compat as tc
from tests.helpers.once import made_once
from tests.helpers.oracle import MAP_LSTM, calibrate, op_decisions
from torchq_compat.errors import QuantizationWarning
from torchq_compat.support.decisions import Decision

INPUTS, HIDDEN = 8, 16
QCONFIG = QConfig(MinMaxObserver, default_weight_observer)
MAPPING = QConfigMapping().set_global(QCONFIG)


class OwnLSTM(nn.LSTM):
    """FX maps by exact class, so a mapping of nn.LSTM does not include this class."""


class Model(nn.Module):
    """A recurrent module one level down, between two Linears."""

    def __init__(self, recurrent: type[nn.Module]) -> None:
        super().__init__()
        self.inp = nn.Linear(INPUTS, INPUTS)
        self.encoder = nn.ModuleDict({"rnn": recurrent(INPUTS, HIDDEN)})
        self.out = nn.Linear(HIDDEN, 4)

    def forward(self, x: Tensor) -> Tensor:
        result = self.encoder["rnn"](self.inp(x))
        return self.out(result[0] if isinstance(result, tuple) else result)


def example(recurrent: type[nn.Module] = nn.LSTM) -> tuple[Tensor]:
    is_cell = issubclass(recurrent, nn.RNNCellBase)
    return (torch.randn(3, INPUTS) if is_cell else torch.randn(5, 3, INPUTS),)


MAPPINGS = {
    "everything": MAPPING,
    "nothing": QConfigMapping(),
    "weight only": QConfigMapping()
    .set_global(QCONFIG)
    .set_object_type(nn.LSTM, float_qparams_weight_only_qconfig),
    "dynamic": QConfigMapping().set_global(QCONFIG).set_object_type(nn.LSTM, default_dynamic_qconfig),
}
CONFIGS = {"unmapped": None, "mapped": MAP_LSTM}


@made_once
def heard(
    recurrent: type[nn.Module], mapping: str, config: str
) -> tuple[nn.Module, GraphModule, list[warnings.WarningMessage]]:
    """Return a float model, its prepared form and the warnings of this package."""
    model = Model(recurrent).eval()
    return model, *listen(
        lambda: tc.prepare_fx(model, MAPPINGS[mapping], example(recurrent), CONFIGS[config])
    )


def prepare_and_listen(
    recurrent: type[nn.Module], mapping: str, config: str = "unmapped"
) -> tuple[GraphModule, list[warnings.WarningMessage]]:
    return heard(recurrent, mapping, config)[1:]


def listen(action: Callable[[], Any]) -> tuple[Any, list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        result = action()
    return result, [record for record in records if issubclass(record.category, QuantizationWarning)]


def decision_about(model: nn.Module, path: str) -> Decision:
    return next(d for d in tc.explain(model) if d.path == path)


MAP_IT = "set_float_to_observed_mapping(torch.nn.{0}, torch.ao.nn.quantizable.{0})"
UNMAPPED = [
    (nn.LSTM, MAP_IT.format("LSTM")),
    (nn.LSTMCell, MAP_IT.format("LSTMCell")),
    (OwnLSTM, "set_float_to_observed_mapping"),
    (nn.GRU, "torchq_compat.nn.quantizable.GRU"),
    (nn.RNN, "torchq_compat.nn.quantizable.RNN"),
    (nn.GRUCell, "torchq_compat.nn.quantizable.GRUCell"),
    (nn.RNNCell, "torchq_compat.nn.quantizable.RNNCell"),
]


@pytest.mark.parametrize(("recurrent", "hint"), UNMAPPED)
def test_a_recurrent_module_nothing_maps(recurrent: type[nn.Module], hint: str) -> None:
    """FX leaves it float silently."""
    prepared, (record,) = prepare_and_listen(recurrent, "everything")
    assert record.filename == __file__
    message = str(record.message)
    assert f"{recurrent.__name__} at 'encoder.rnn' stays float" in message
    assert "no custom-module mapping" in message
    assert hint in message
    decision = decision_about(prepared, "encoder.rnn")
    assert (decision.kind, decision.action.value) == (recurrent.__name__, "float")
    assert hint in decision.reason


@pytest.mark.parametrize(("recurrent", "hint"), UNMAPPED)
def test_it_stays_float_and_its_neighbours_do_not(recurrent: type[nn.Module], hint: str) -> None:
    model, prepared, records = heard(recurrent, "everything", "unmapped")
    calibrate(prepared, [example(recurrent)])
    converted, later = listen(lambda: tc.convert_to_reference_fx(prepared))
    assert len(records + later) == 1
    x = example(recurrent)[0]
    assert float((prepared(x) - model(x)).abs().max()) < 1e-5
    assert decision_about(converted, "encoder.rnn").action.value == "float"
    assert {d.path for d in tc.explain(converted) if d.action.value == "quantized"} == {"inp", "out"}
    assert hint in decision_about(converted, "encoder.rnn").reason
    weights = [b for b in converted.buffers() if b.dtype is torch.int8]
    assert [tuple(w.shape) for w in weights] == [(INPUTS, INPUTS), (4, HIDDEN)]


@pytest.mark.parametrize("mapping", ["everything", "nothing"])
@pytest.mark.parametrize("recurrent", [recurrent for recurrent, _ in UNMAPPED])
def test_there_is_one_decision_about_a_module(recurrent: type[nn.Module], mapping: str) -> None:
    prepared, _ = prepare_and_listen(recurrent, mapping)
    paths = [decision.path for decision in op_decisions(prepared)]
    assert sorted(paths) == ["encoder.rnn", "inp", "out"]


def test_a_subclass_that_computes_like_its_base_is_mapped_with_it() -> None:
    prepared, records = prepare_and_listen(OwnLSTM, "everything", "mapped")
    assert not records
    assert decision_about(prepared, "encoder.rnn").action.value == "quantized"


def test_a_subclass_with_a_forward_of_its_own_is_not_what_the_mapping_names() -> None:
    class Doubling(OwnLSTM):
        def forward(self, x: Any, hx: Any = None) -> Any:  # type: ignore[override]
            return super().forward(2 * x, hx)

    _, records = prepare_and_listen(Doubling, "everything", "mapped")
    told = sorted(str(record.message) for record in records)
    assert len(told) == 2
    assert "'float_to_observed_mapping LSTM' is dropped" in told[0] + told[1]
    assert "Doubling at 'encoder.rnn' stays float" in told[0] + told[1]
    assert "mapping(Doubling, " in told[0] + told[1]


def test_a_mapped_lstm_whose_qconfig_is_weight_only() -> None:
    """FX leaves it float silently."""
    prepared, (record,) = prepare_and_listen(nn.LSTM, "weight only", "mapped")
    assert record.filename == __file__
    assert "LSTM at 'encoder.rnn' stays float" in str(record.message)
    assert "its qconfig is weight_only and its class is mapped for static qconfigs" in str(record.message)
    assert "map it" not in str(record.message)
    assert decision_about(prepared, "encoder.rnn").action.value == "float"


def test_a_mapped_lstm_whose_qconfig_is_dynamic() -> None:
    """It is quantized dynamically, as in FX."""
    prepared, records = prepare_and_listen(nn.LSTM, "dynamic", "mapped")
    assert not records
    decision = decision_about(prepared, "encoder.rnn")
    assert decision.action.value == "quantized"
    assert "dynamically" in decision.reason


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(INPUTS, INPUTS), nn.Linear(HIDDEN, 4)
        kinds = {"lstm_rnn": nn.LSTM, "gru_rnn": nn.GRU, "cell_rnn": nn.GRUCell}
        self.encoder = nn.ModuleDict({name: kind(INPUTS, HIDDEN) for name, kind in kinds.items()})

    def forward(self, x: Tensor) -> list[Tensor]:
        y = self.inp(x)
        lstm, gru, cell = self.encoder.values()
        return [self.out(result) for result in (lstm(y)[0], gru(y)[0], cell(y[0]))]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(
    "mapping",
    [
        QConfigMapping(),
        QConfigMapping()
        .set_global(QCONFIG)
        .set_module_name("encoder.lstm_rnn", None)
        .set_module_name("encoder.gru_rnn", None)
        .set_module_name("encoder.cell_rnn", None),
        QConfigMapping().set_global(QCONFIG).set_module_name("encoder", None),
        QConfigMapping().set_global(QCONFIG).set_module_name_regex("enc.*rnn", None),
        QConfigMapping()
        .set_global(QCONFIG)
        .set_object_type(nn.LSTM, None)
        .set_object_type(nn.GRU, None)
        .set_object_type(nn.GRUCell, None),
        QConfigMapping().set_object_type(nn.Linear, QCONFIG),
    ],
    ids=["empty", "name", "parent", "regex", "type", "others only"],
)
def test_qconfig_none_is_a_decision_and_no_warning(mapping: QConfigMapping, config: str) -> None:
    model = Three().eval()
    prepared, records = listen(lambda: tc.prepare_fx(model, mapping, example(), CONFIGS[config]))
    assert records == []
    for name in model.encoder:
        decision = decision_about(prepared, f"encoder.{name}")
        assert decision.action.value == "float"
        assert "its qconfig is None" in decision.reason


def test_every_one_of_several_is_named() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.LSTM(INPUTS, INPUTS), nn.GRU(INPUTS, HIDDEN)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x)[0])[0]

    _, records = listen(lambda: tc.prepare_fx(Two().eval(), MAPPING, example()))
    (record,) = records
    assert [part[-11:].strip() for part in str(record.message).split(" stays")[:2]] == [
        "LSTM at 'a'",
        "GRU at 'b'",
    ]


def test_a_mapped_lstm_is_not_warned_about() -> None:
    prepared, records = prepare_and_listen(nn.LSTM, "everything", "mapped")
    assert records == []
    assert decision_about(prepared, "encoder.rnn").action.value == "quantized"


# Converting before calibration


@pytest.mark.parametrize("convert", [tc.convert_fx, tc.convert_to_reference_fx])
def test_converting_what_has_seen_no_data(convert: Callable[[GraphModule], GraphModule]) -> None:
    prepared, _ = prepare_and_listen(nn.LSTM, "everything", "mapped")
    _, (record,) = listen(lambda: convert(prepared))
    assert record.filename == __file__
    message = str(record.message)
    # x, inp, out and seven parts of the cell; the zeros of the omitted state are no inputs of the graph.
    assert message.startswith("10 observers have seen no data")
    assert "x (activation_post_process_0), inp" in message
    assert "and 5 more" in message
    assert "Calibrate through every branch" in message


def test_parts_of_cells_are_named() -> None:
    prepared = tc.prepare_fx(nn.Sequential(nn.LSTM(INPUTS, HIDDEN)).eval(), MAPPING, example(), MAP_LSTM)
    _, (record,) = listen(lambda: tc.convert_fx(prepared))
    assert "0.layers.0.layer_fw.cell.igates (activation_post_process_" in str(record.message)


def test_converting_what_was_calibrated_says_nothing() -> None:
    prepared, told = prepare_and_listen(nn.LSTM, "everything", "mapped")
    calibrate(prepared, [example()])
    converted, records = listen(lambda: tc.convert_to_reference_fx(prepared))
    assert told + records == []
    assert isinstance(converted, GraphModule)


def test_the_warning_comes_again_for_every_model_and_call() -> None:
    """Python shows a warning of one line only once, which must not hide that of the second model."""
    prepared, _ = prepare_and_listen(nn.LSTM, "everything", "mapped")
    for _ in range(2):
        assert len(listen(lambda: tc.convert_fx(prepared))[1]) == 1
    calibrate(prepared, [example()])
    assert listen(lambda: tc.convert_fx(prepared))[1] == []


# explain


def test_explain_a_float_model() -> None:
    report = tc.explain(Model(nn.LSTM))
    assert [(d.path, d.kind, d.action.value) for d in report] == [
        ("inp", "Linear", "float"),
        ("encoder.rnn", "LSTM", "float"),
        ("out", "Linear", "float"),
    ]
    assert all("has not been prepared" in d.reason for d in report)


STAGES = ("float", "prepared", "converted")


@pytest.fixture(scope="module")
def stages() -> dict[str, nn.Module]:
    model, prepared, _ = heard(nn.LSTM, "everything", "mapped")
    calibrate(prepared, [example()])
    converted = tc.convert_to_reference_fx(prepared)
    return dict(zip(STAGES, (model, prepared, converted), strict=True))


@pytest.mark.parametrize("stage", STAGES)
def test_explain_is_printable(stages: dict[str, nn.Module], stage: str) -> None:
    report = tc.explain(stages[stage])
    text = report.to_text(200)
    assert text.startswith(f"{report.summary}\n\nwhere")
    for decision in report:
        assert decision.path.rpartition(".")[2] in text
    assert repr(report) == f"<Report: {report.summary}>"
    for width in (80, 200):
        assert max(map(len, report.to_text(width).splitlines()[1:])) <= width


@pytest.mark.parametrize("stage", STAGES)
def test_explain_is_data(stages: dict[str, nn.Module], stage: str) -> None:
    report = tc.explain(stages[stage])
    rows = json.loads(report.to_json())
    assert [row["path"] for row in rows] == [d.path for d in report]
    assert [row["path"] for row in report.as_dicts()] == [d.path for d in report]
    assert {
        "path",
        "kind",
        "action",
        "reason",
        "details",
        "node",
        "warn",
        "values",
        "is_part",
        "unlike_fx",
        "code",
    } == set(rows[0])
    assert "encoder.rnn" in {row["path"] for row in rows}


def test_explain_has_no_qparams_before_conversion_and_all_of_them_after(stages: dict[str, nn.Module]) -> None:
    quantized = {"inp", "out", *(f"encoder.rnn.layers.0.layer_fw.cell.{part}" for part in PARTS)}
    for stage in ("prepared", "converted"):
        decisions = [d for d in tc.explain(stages[stage]) if d.action.value == "quantized"]
        assert {d.path for d in decisions} == {*quantized, "encoder.rnn"}
        with_scale = {d.path for d in decisions if "scale" in d.details}
        assert with_scale == (quantized if stage == "converted" else set())


PARTS = (
    *("igates", "hgates", "gates", "input_gate", "forget_gate", "cell_gate", "output_gate"),
    *("fgate_cx", "igate_cgate", "fgate_cx_igate_cgate", "tanh_cy", "ogate_cy"),
)


def test_explain_finds_below_a_path(stages: dict[str, nn.Module]) -> None:
    report = tc.explain(stages["converted"])
    assert len(report.find("encoder")) == 1 + len(PARTS)
    assert report.find("enc") == ()
    assert report.left_float() == ()


def test_explain_changes_nothing(stages: dict[str, nn.Module]) -> None:
    for model in stages.values():
        before, code = copy.deepcopy(model.state_dict()), getattr(model, "code", "")
        tc.explain(model)
        assert model.state_dict().keys() == before.keys()
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert getattr(model, "code", "") == code


def test_one_warning_for_all_hooks_but_those_of_weight_norm() -> None:
    linears = [nn.utils.weight_norm(nn.Linear(4, 4)) for _ in range(4)]
    conv = nn.utils.weight_norm(nn.Conv1d(4, 4, 1))
    model, x = nn.Sequential(*linears).eval(), torch.randn(2, 4)
    prepared, told = listen(lambda: tc.prepare_fx(model, MAPPING, (x,)))
    assert not told
    assert {d.path for d in tc.explain(prepared) if d.action.value == "dropped"} == {"0", "1", "2", "3"}
    for module in (*linears, conv):
        module.register_forward_hook(lambda *_: None)
    _, (record,) = listen(lambda: tc.prepare_fx(model, MAPPING, (x,)))
    assert "hooks of Linear at '0', '1', '2' and 1 more are dropped: hooks run once" in str(record.message)
    both = nn.Sequential(nn.Unflatten(1, (4, 1)), conv, nn.Flatten(), linears[0]).eval()
    prepared, (record,) = listen(lambda: tc.prepare_fx(both, MAPPING, (x,)))
    assert "hooks of Conv1d at '1', hooks of Linear at '3' are dropped" in str(record.message)
    assert {d.path for d in tc.explain(prepared) if d.action.value == "dropped"} == {"1", "3"}
