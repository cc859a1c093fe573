"""ONNX files in ONNX Runtime: the reference's bits with its optimizer off, close to them with default
options, at another length and batch than exported; int8 weights."""

from __future__ import annotations

import copy
import errno
import io
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import (
    FixedQParamsObserver,
    QConfigMapping,
    default_dynamic_qconfig,
    disable_observer,
    float_qparams_weight_only_qconfig,
    get_default_qat_qconfig_mapping,
    get_default_qconfig_mapping,
)
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e.observer import MinMaxObserver
from torchao.quantization.pt2e.quantizer import QuantizationSpec

import torchq_compat as tc
from tests.helpers.once import made_once
from tests.helpers.onnx_registry import registry_made_once
from tests.helpers.oracle import leaves, sqnr
from tests.helpers.quantizers import ByHand, annotate
from torchq_compat import recurrent_parts
from torchq_compat.errors import ArgumentError, ExportError, PathError, QuantizationWarning
from torchq_compat.lower.onnx import lowering as packages
from torchq_compat.lower.onnx.lowering import OnnxModel, to_onnx
from torchq_compat.nn import quantizable
from torchq_compat.support.quantized_tensors import sums_saturate

X86 = get_default_qconfig_mapping("x86")
DYNAMIC = QConfigMapping().set_global(default_dynamic_qconfig)
EMBEDDINGS = (
    QConfigMapping()
    .set_global(X86.global_qconfig)
    .set_object_type(nn.Embedding, float_qparams_weight_only_qconfig)
)
LEVELS = onnxruntime.GraphOptimizationLevel
INFINITE = float("inf")


@pytest.fixture(scope="module", autouse=True)
def _shared() -> None:
    registry_made_once()


class Outputs(nn.Module):
    """A recurrent module that returns its whole result."""

    def __init__(self, recurrent: nn.Module) -> None:
        super().__init__()
        self.rnn = recurrent

    def forward(self, x: Tensor) -> Any:
        return self.rnn(x)


class CRNN(nn.Module):
    """A convolution over a line of text, and a recurrent module along it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.pool = nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.MaxPool2d((4, 1))
        self.lstm, self.head = nn.LSTM(12, 10, bidirectional=True), nn.Linear(20, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.pool(torch.relu(self.bn(self.conv(x)))).flatten(1, 2).permute(2, 0, 1)
        return self.head(self.lstm(y)[0])


class Speech(nn.Module):
    """As in DeepSpeech: normalized convolutions, and recurrent modules whose directions are summed."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(1, 8, (11, 5), (2, 2), (5, 2)),
            nn.BatchNorm2d(8),
            nn.Hardtanh(0, 20),
            nn.Conv2d(8, 8, 3, 2, 1),
        )
        self.gru, self.norm, self.fc = nn.GRU(64, 24, bidirectional=True), nn.LayerNorm(24), nn.Linear(24, 12)
        nn.init.uniform_(self.conv[1].running_var, 0.5, 2)
        nn.init.normal_(self.conv[1].running_mean, 0, 0.2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).flatten(1, 2).permute(2, 0, 1)
        y, _ = self.gru(y)
        return self.fc(self.norm(y.unflatten(2, (2, 24)).sum(2)))


class CellLoop(nn.Module):
    """A cell called step by step in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(8, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h, outputs = x.new_zeros(x.size(1), 16), []
        for t in range(x.size(0)):
            h = self.cell(x[t], h)
            outputs.append(h)
        return self.head(torch.stack(outputs)), h


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.head = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm(self.first(x)))
        return self.head(torch.relu(self.second(y) + y).mean((2, 3)))


class Attention(nn.Module):
    """Attention heads of one block, written out, and its feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.norm, self.mlp = nn.LayerNorm(16), nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (2, 8)).transpose(1, 2) for each in (self.q, self.k, self.v))
        weights = torch.softmax(q @ k.transpose(-1, -2) / 8**0.5, -1)
        y = x + self.out((weights @ v).transpose(1, 2).flatten(-2))
        return y + self.mlp(self.norm(y))


def with_16_bits() -> type[nn.Module]:
    """Gate sums, gates and cell state with 16 bits in int32, as torch.ao documents them."""

    def fixed(scale: float, zero_point: int) -> Any:
        return FixedQParamsObserver.with_args(scale=scale, zero_point=zero_point, dtype=torch.qint32)

    class Observed(quantizable.LSTM):
        @classmethod
        def from_float(cls, other: Any) -> Any:
            return recurrent_parts.get_individually_observed_parts(
                other,
                linear_output_obs_ctr=fixed(2**-11, 2**15),
                sigmoid_obs_ctr=fixed(2**-16, 0),
                tanh_obs_ctr=fixed(2**-15, 2**15),
                cell_state_obs_ctr=fixed(2**-11, 0),
            )

    return Observed


def converted(
    model: nn.Module, mapping: Any, x: Tensor, *, observed: Any = None, is_qat: bool = False
) -> GraphModule:
    torch.manual_seed(0)
    config = tc.get_default_prepare_custom_config()
    if observed is not None:
        config.set_float_to_observed_mapping(nn.LSTM, observed)
    prepare = tc.prepare_qat_fx if is_qat else tc.prepare_fx
    prepared = prepare(model.train(is_qat), mapping, (x,), config)
    with torch.no_grad():
        for _ in range(2):
            prepared(x)
    return tc.convert_to_reference_fx(prepared.eval())


def run(model: Any, x: Tensor, level: Any = LEVELS.ORT_ENABLE_ALL) -> list[Tensor]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level, options.log_severity_level = level, 3
    session = onnxruntime.InferenceSession(model.to_bytes(), options)
    return [torch.from_numpy(each) for each in session.run(None, {session.get_inputs()[0].name: x.numpy()})]


EQUAL_SHARE = 0.75


def check(model: GraphModule, example: Tensor, other: Tensor, **settings: Any) -> Any:
    """Assert equal bits with the optimizer off and 40 dB with it, at other sizes; return the ONNX model.

    Float convolutions sum in another order: a value midway between two integers may round to the other one,
    which changes the rest of its row.
    """
    made = tc.to_onnx(model, (example,), **settings)
    check_results(model, made, other)
    return made


def check_results(model: GraphModule, made: OnnxModel, other: Tensor) -> None:
    share = EQUAL_SHARE if any("conv" in str(node.target) for node in model.graph.nodes) else 1.0
    with torch.no_grad():
        expected = leaves(model(other))
    exact = [*zip(expected, run(made, other, LEVELS.ORT_DISABLE_ALL), strict=True)]
    assert [float((a == b).float().mean()) >= share for a, b in exact] == [True] * len(exact)
    for pairs in exact, [*zip(expected, run(made, other), strict=True)]:
        assert min(sqnr(a, b) for a, b in pairs) >= 40


SEQUENCE, LONGER = torch.randn(5, 2, 8), torch.randn(17, 9, 8)
IMAGE, IMAGES = torch.randn(2, 3, 8, 8), torch.randn(7, 3, 12, 10)
LINE, LINES = torch.randn(2, 1, 8, 20), torch.randn(5, 1, 8, 33)
ROWS = torch.randn(2, 5, 16)
SOUND, LONG_SOUND = torch.randn(2, 1, 32, 40), torch.randn(3, 1, 32, 57)
TOKENS, MORE_TOKENS = torch.randint(0, 50, (2, 5)), torch.randint(0, 50, (4, 9))


def two_bidirectional_layers() -> tuple[GraphModule, Tensor, Tensor]:
    return converted(Outputs(nn.LSTM(8, 32, 2, bidirectional=True)), X86, SEQUENCE), SEQUENCE, LONGER


class Words(nn.Module):
    """A linear and an LSTM side by side, behind an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head, self.rnn = nn.Embedding(50, 8), nn.Linear(8, 6), nn.LSTM(8, 12)

    def forward(self, x: Tensor) -> Any:
        rows = self.table(x)
        return self.head(rows), self.rnn(rows)


def test_embeddings_linears_and_a_loop_of_integers_of_any_size() -> None:
    """Rows are dequantized from a table of integers; torch.onnx alone would round its zero points (33 dB)."""
    model = converted(Words(), EMBEDDINGS, TOKENS)
    check_loops(check(model, TOKENS, MORE_TOKENS), 1, {50: onnx.TensorProto.UINT8})
    check_default_exporter(model, TOKENS)


@pytest.mark.slow
def test_two_bidirectional_layers() -> None:
    """ONNX Runtime would turn a MatMul of floats and dequantized integers into MatMulNBits: 34 to 43 dB."""
    check_loops(check(*two_bidirectional_layers()), 4)


def check_loops(made: Any, count: int, tables: dict[int, int] | None = None) -> None:
    """Assert the number of loops, and that weights are int8, but for ``tables``: by rows their dtype."""
    assert made.opset == 21
    assert made.free_sizes == ("x in dimension 0", "x in dimension 1")
    operators = [node.op_type for node in made.proto.graph.node]
    assert operators.count("Scan") == count
    weights = {each.dims[0]: each.data_type for each in made.proto.graph.initializer if len(each.dims) == 2}
    found = {rows: weights.pop(rows) for rows in tables or {}}
    assert found == (tables or {})
    assert set(weights.values()) == {onnx.TensorProto.INT8}


SLOW: dict[str, Callable[[], tuple[GraphModule, Tensor, Tensor]]] = {
    "residual": lambda: (converted(Residual(), X86, IMAGE), IMAGE, IMAGES),
    "gru": lambda: (converted(Outputs(nn.GRU(8, 12, bidirectional=True)), X86, SEQUENCE), SEQUENCE, LONGER),
    "rnn": lambda: (converted(Outputs(nn.RNN(8, 12, nonlinearity="relu")), X86, SEQUENCE), SEQUENCE, LONGER),
    "projection": lambda: (
        converted(Outputs(nn.LSTM(8, 12, proj_size=5, batch_first=True)), X86, SEQUENCE),
        SEQUENCE,
        LONGER,
    ),
    "crnn": lambda: (converted(CRNN(), X86, LINE), LINE, LINES),
    "speech": lambda: (converted(Speech(), X86, SOUND), SOUND, LONG_SOUND),
    "cell loop": lambda: (converted(CellLoop(), X86, SEQUENCE), SEQUENCE, LONGER),
    "attention": lambda: (converted(Attention(), X86, ROWS), ROWS, torch.randn(3, 9, 16)),
    "16 bits": lambda: (
        converted(Outputs(nn.LSTM(8, 12)), X86, SEQUENCE, observed=with_16_bits()),
        SEQUENCE,
        LONGER,
    ),
    "trained": lambda: (
        converted(CRNN(), get_default_qat_qconfig_mapping("x86"), LINE, is_qat=True),
        LINE,
        LINES,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_more_models(name: str) -> None:
    check(*SLOW[name]())


@pytest.mark.slow
def test_dynamic_loop() -> None:
    """Gates and states are floats, which torch and ONNX Runtime round differently."""
    dynamic = converted(Outputs(nn.LSTM(8, 12, 2)), DYNAMIC, SEQUENCE)
    made = tc.to_onnx(dynamic, (SEQUENCE,))
    expected = leaves(dynamic(LONGER))
    for level in (LEVELS.ORT_DISABLE_ALL, LEVELS.ORT_ENABLE_ALL):
        assert all(sqnr(a, b) >= 80 for a, b in zip(expected, run(made, LONGER, level), strict=True))


@pytest.mark.parametrize("layers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_dynamic_quantize_lstm(layers: int) -> None:
    """ONNX Runtime's operator is as far from the float model as our dynamic module."""
    torch.manual_seed(0)
    model = Outputs(nn.LSTM(8, 32, layers, bidirectional=True)).eval()
    dynamic = converted(copy.deepcopy(model), DYNAMIC, SEQUENCE)
    made = tc.to_onnx(dynamic, (SEQUENCE,), dynamic_lstm="DynamicQuantizeLSTM")
    operators = [node.op_type for node in made.proto.graph.node]
    assert operators.count("DynamicQuantizeLSTM") == layers
    assert "Scan" not in operators
    with torch.no_grad():
        floats, ours = leaves(model(LONGER)), leaves(dynamic(LONGER))
    for exact, here, there in zip(floats, ours, run(made, LONGER), strict=True):
        assert sqnr(exact, there) > sqnr(exact, here) - 1
        assert 20 < sqnr(exact, there) < 70


@pytest.mark.slow
def test_size_of_a_model_of_lstms(tmp_path: Path) -> None:
    model = Outputs(nn.LSTM(256, 512, 2)).eval()
    parameters = 4 * sum(each.numel() for each in model.parameters())
    x = torch.randn(3, 2, 256)
    tc.to_onnx(converted(model, X86, x), (x,), path=tmp_path / "lstm.onnx")
    assert (tmp_path / "lstm.onnx").stat().st_size < 0.30 * parameters


def lowered_lstm() -> GraphModule:
    torch.manual_seed(0)
    prepared = tc.prepare_fx(nn.LSTM(8, 6).eval(), X86, (SEQUENCE,), tc.get_default_prepare_custom_config())
    prepared(SEQUENCE)
    return tc.convert_fx(prepared)


def by_default_exporter(model: nn.Module, x: Tensor, other: Tensor | None = None, **settings: Any) -> Any:
    """Run what torch.onnx.export alone makes of ``model``, on ``other`` or ``x``, without and with ONNX
    Runtime's optimizer; return the results and the operators."""
    proto = torch.onnx.export(model, (x,), verbose=False, **settings).model_proto
    file = OnnxModel(proto, 18, ())
    results = [run(file, x if other is None else other, level) for level in BOTH_LEVELS]
    return results, [node.op_type for node in proto.graph.node]


BOTH_LEVELS = LEVELS.ORT_DISABLE_ALL, LEVELS.ORT_ENABLE_ALL


def check_default_exporter(model: nn.Module, x: Tensor, other: Tensor | None = None, **settings: Any) -> None:
    """Assert equal bits with the optimizer off and 40 dB with it."""
    (exact, optimized), _ = by_default_exporter(model, x, other, **settings)
    reference = getattr(model, "reference", model)
    with torch.no_grad():
        expected = leaves(reference(x if other is None else other))
    assert [sqnr(*pair) for pair in zip(expected, exact, strict=True)] == [INFINITE] * len(expected)
    assert all(sqnr(*pair) >= 40 for pair in zip(expected, optimized, strict=True))


def test_the_default_exporter_works() -> None:
    """From a lowered model the exporter gets the reference, in operators that it exports correctly."""
    check_default_exporter(linear("convert_fx"), torch.randn(3, 8))


def test_the_default_exporter_of_a_model_around_it() -> None:
    x = torch.randn(3, 8)
    around = nn.Sequential(linear("convert_to_reference_fx"), nn.Softmax(-1)).eval()
    (exact, _), operators = by_default_exporter(around, x)
    torch.testing.assert_close(exact[0], around(x), rtol=0, atol=1e-6)
    assert {"QuantizeLinear", "DequantizeLinear", "Softmax"} <= set(operators)


def test_the_default_exporter_saturates_where_the_model_does() -> None:
    """QuantizeLinear saturates at the range of its dtype, and 7 bits are half of that range."""
    seven_bits = QuantizationSpec(torch.int8, MinMaxObserver, -64, 63, torch.per_tensor_affine)

    def write(node: Node) -> None:
        if node.target is torch.ops.aten.relu.default:
            annotate(node, {node.args[0]: seven_bits}, seven_bits)

    prepared = tc.prepare_fx(nn.Sequential(nn.ReLU()).eval(), ByHand(write), (torch.ones(2, 3),))
    prepared(torch.rand(2, 3))
    model, large = tc.convert_to_reference_fx(prepared), torch.full((2, 3), 50.0)
    (exact, _), _ = by_default_exporter(model, large)
    assert torch.equal(exact[0], model(large))
    assert float(model(large).max()) < 2


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SLOW, "two bidirectional layers"])
def test_the_default_exporter_of_more_models(name: str) -> None:
    models = {"two bidirectional layers": two_bidirectional_layers, **SLOW}
    model, x, _ = models[name]()
    check_default_exporter(model, x)


@pytest.mark.slow
def test_the_default_exporter_with_free_sizes() -> None:
    model, x, other = two_bidirectional_layers()
    free = torch.export.Dim.DYNAMIC
    check_default_exporter(model, x, other, dynamic_shapes=({0: free, 1: free},))


@pytest.mark.slow
def test_the_default_exporter_of_dynamic_qparams() -> None:
    dynamic = converted(Outputs(nn.LSTM(8, 12, 2)), DYNAMIC, SEQUENCE)
    results, operators = by_default_exporter(dynamic, SEQUENCE)
    assert operators.count("Scan") == 2
    for result in results:
        assert all(sqnr(*pair) >= 80 for pair in zip(leaves(dynamic(SEQUENCE)), result, strict=True))


def test_the_old_exporter_says_what_to_do() -> None:
    model, x = linear("convert_fx"), torch.randn(3, 8)
    with pytest.raises(ExportError, match=r"to_onnx\(converted, example_inputs"):
        torch.onnx.export(model, (x,), "never.onnx", dynamo=False)
    assert not Path("never.onnx").exists()


@made_once
def linear(convert: str) -> GraphModule:
    """Return a small model that the named function of this package converted."""
    torch.manual_seed(0)
    prepared = tc.prepare_fx(nn.Sequential(nn.Linear(8, 6), nn.ReLU()).eval(), X86, (torch.randn(3, 8),))
    prepared(torch.randn(30, 8))
    return getattr(tc, convert)(prepared)


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "opset": ({"opset": 17}, ExportError, "opset 17 is too old"),
    "future opset": ({"opset": 4000}, ExportError, "opset 4000 is not known"),
    "no opset": ({"opset": "21"}, ArgumentError, "opset"),
    "dynamic_lstm": ({"dynamic_lstm": "fast"}, ExportError, "DynamicQuantizeLSTM"),
    "path": ({"path": 3}, ArgumentError, "path"),
    "dynamic_shapes": ({"dynamic_shapes": {"nothing": 3}}, ExportError, "dynamic_shapes"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case: str) -> None:
    settings, error, message = BAD[case]
    with pytest.raises(error, match=message):
        tc.to_onnx(linear("convert_to_reference_fx"), (torch.randn(3, 8),), **settings)


@pytest.mark.parametrize(("place", "message"), [("not/there.onnx", "No such file"), ("", "Is a directory")])
def test_a_path_that_cannot_be_written(tmp_path: Path, place: str, message: str) -> None:
    """It is refused first, not after minutes: what is no converted model is never looked at."""
    with pytest.raises(PathError, match=f"{message}.*") as found:
        tc.to_onnx(nn.Linear(8, 6), (torch.randn(3, 8),), path=tmp_path / place)
    assert isinstance(found.value, OSError)
    assert "Hint:" in str(found.value)
    assert not list(tmp_path.iterdir())


def test_a_write_that_fails_leaves_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    there = tmp_path / "model.onnx"
    there.write_bytes(b"older")
    made = squeezed_in_onnx()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(PathError, match="No space left"):
        made.save(there)
    assert [each.read_bytes() for each in tmp_path.iterdir()] == [b"older"]


def test_no_model() -> None:
    with pytest.raises(ExportError, match="no model that convert_fx"):
        tc.to_onnx(nn.Linear(8, 6), (torch.randn(3, 8),))


def test_a_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(packages, "import_module", missing)
    with pytest.raises(ExportError, match=r"\.\[onnx\]"):
        tc.to_onnx(linear("convert_to_reference_fx"), (torch.randn(3, 8),))


@pytest.mark.slow
def test_the_package_does_not_import_onnx() -> None:
    code = "import sys, torchq_compat as t; t.to_onnx, t.convert_fx; assert 'onnxscript' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


class Squeezed(nn.Module):
    """A squeeze that does nothing in torch, and half of the steps."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.squeeze(1)[:, : math.ceil(x.size(1) / 2)])


@made_once
def squeezed() -> GraphModule:
    with pytest.warns(QuantizationWarning, match=r"as long as it is at least 2"):
        return converted(Squeezed(), X86, torch.randn(2, 7, 4))


@made_once
def squeezed_in_onnx() -> OnnxModel:
    return tc.to_onnx(squeezed.itself(), (torch.randn(2, 7, 4),))


def test_an_idle_squeeze_and_a_rounded_size() -> None:
    model = squeezed()
    check_results(model, squeezed_in_onnx(), torch.randn(3, 11, 4))
    # torch's serializer has no form for math.ceil.
    buffer = io.BytesIO()
    torch.export.save(tc.export(model, (torch.randn(2, 7, 4),)), buffer)
    buffer.seek(0)
    other = torch.randn(3, 12, 4)
    assert torch.equal(torch.export.load(buffer).module()(other), model(other))


def test_what_onnx_runtime_refuses() -> None:
    model, made, x = squeezed(), squeezed_in_onnx(), torch.randn(2, 7, 4)
    made.proto.graph.node[0].op_type = "NoSuchOperator"
    with pytest.raises(ExportError, match=r"ONNX Runtime refuses what was written.*NoSuchOperator"):
        packages.check_in_runtime(made, model, [(x,)])


class Given(nn.Module):
    """An LSTM and a GRU side by side, each with a sequence and a state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru, self.fc = nn.LSTM(6, 5), nn.GRU(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor, h: Tensor, y: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        return self.fc(self.lstm(x, (h, h))[0]), self.fc(self.gru(y, g)[0])


def test_states_given_to_recurrent_modules_that_stay_float() -> None:
    mapping = get_default_qconfig_mapping("x86").set_object_type(nn.LSTM, None).set_object_type(nn.GRU, None)
    args = (torch.randn(3, 2, 6), torch.randn(1, 2, 5), torch.randn(4, 2, 6), torch.randn(1, 2, 5))
    prepared = tc.prepare_fx(Given().eval(), mapping, args)
    prepared(*args)
    quantized = tc.convert_fx(prepared)
    with pytest.warns(QuantizationWarning, match="x in dimension 0 to 3, y in dimension 0 to 4"):
        model = to_onnx(quantized, args)
    assert {f"{name} in dimension 1" for name in "xhyg"} <= {*model.free_sizes}
    assert not any("dimension 2" in size for size in model.free_sizes)
    session = onnxruntime.InferenceSession(model.to_bytes())
    for batch in 2, 3:
        given = [torch.randn(arg.size(0), batch, arg.size(2)) for arg in args]
        results = session.run(None, {name: each.numpy() for name, each in zip("xhyg", given, strict=True)})
        pairs = zip(quantized(*given), map(torch.from_numpy, results), strict=True)
        assert [sqnr(*pair) > 40 for pair in pairs] == [True, True]


class Negated(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return -x


class NegatedFrom(nn.Module):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def forward(self, x: Tensor) -> Tensor:
        return -x if x.shape[1] >= self.length else x


def test_other_results_are_told() -> None:
    model, made, x = squeezed(), squeezed_in_onnx(), torch.randn(2, 7, 4)
    packages.check_in_runtime(made, model, [(x,)])
    with pytest.warns(QuantizationWarning, match=r"something else.* \(2, 7, 4\): -?\d.* dB.*TQ436"):
        packages.check_in_runtime(made, nn.Sequential(model, Negated()), [(x,)])


def test_results_that_the_optimizer_changes_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without VNNI by its own kernels; here by hand, whatever the CPU."""
    model, made, x = squeezed(), squeezed_in_onnx(), torch.randn(2, 7, 4)

    class Session(onnxruntime.InferenceSession):
        def run(self, *args: Any, **kwargs: Any) -> list[Any]:
            results = super().run(*args, **kwargs)
            level = self.get_session_options().graph_optimization_level
            return [0.9 * result if level == LEVELS.ORT_ENABLE_ALL else result for result in results]

    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    with pytest.warns(QuantizationWarning, match=r"optimizer changes .*: 20\.0 dB beside .*TQ443"):
        packages.check_in_runtime(made, model, [(x,)])
    wrong = nn.Sequential(model, NegatedFrom(5))  # at another size, which is told beside it
    with pytest.warns(QuantizationWarning) as said:
        packages.check_in_runtime(made, wrong, [(x,), (x[:, :6],), (torch.randn(2, 9, 4),)])
    assert [str(each.message)[-6:-1] for each in said] == ["TQ443", "TQ436"]


def test_whole_range_sums_on_this_cpu() -> None:
    """They saturate without VNNI, and that is told; elsewhere the results are those of the model."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 4)).eval(), torch.randn(32, 64)
    prepared = tc.prepare_fx(model, get_default_qconfig_mapping("qnnpack"), (x,))
    prepared(x)
    quantized = tc.convert_fx(prepared)
    if sums_saturate():
        with pytest.warns(QuantizationWarning, match="TQ443"):
            tc.to_onnx(quantized, (x,))
    else:
        assert sqnr(quantized(x), run(tc.to_onnx(quantized, (x,)), x)[0]) > 40


class Steps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 4)
        self.register_buffer("count", torch.tensor(5.0))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.fc(x) * self.count


def test_buffers_that_are_written_are_told() -> None:
    x = torch.randn(4, 8)
    prepared = tc.prepare_fx(Steps().eval(), get_default_qconfig_mapping("x86"), (x,))
    prepared(x)
    quantized = tc.convert_fx(prepared)
    with pytest.warns(QuantizationWarning, match="the model writes count in its forward"):
        model = to_onnx(quantized, (x,))
    assert quantized.count == 6
    first = quantized(x)
    assert all(sqnr(first, run(model, x)[0]) > 40 for _ in range(2))
    assert 10 < sqnr(quantized(x), first) < 20


def test_fake_quantizes_become_quantize_and_dequantize() -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()), torch.randn(4, 3, 8, 8)
    trained = tc.prepare_qat_fx(model, get_default_qat_qconfig_mapping("x86"), (x,))
    trained(x).sum().backward()
    trained.eval().apply(disable_observer)
    with pytest.raises(ExportError, match=r"convert_fx or convert_to_reference_fx returned"):
        to_onnx(trained, (x,))
    written = to_onnx(tc.convert_to_reference_fx(trained), (x,))
    assert Counter(node.op_type for node in written.proto.graph.node)["QuantizeLinear"] == 2
    (weight,) = (each for each in written.proto.graph.initializer if len(each.dims) == 4)
    assert weight.data_type == onnx.TensorProto.INT8
    (result,) = run(written, x, LEVELS.ORT_DISABLE_ALL)
    assert sqnr(trained(x).detach(), result) > 60
