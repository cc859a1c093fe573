"""The documented 16-bit LSTM flow of torch.ao, part by part, with the classes that users wrote for FX.

The same classes run through both engines: only the module ``lstm_utils`` comes from differs.
"""

from __future__ import annotations

import copy
import inspect
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.ao.quantization.fx.lstm_utils as fx_lstm_utils
import torch.ao.quantization.quantize_fx as fx
from torch import Tensor, nn
from torch.ao.quantization import get_default_qconfig_mapping
from torch.ao.quantization.fx.custom_config import PrepareCustomConfig
from torch.fx import GraphModule, Interpreter, Node
from torchao.quantization.pt2e.fake_quantize import FakeQuantizeBase

import torchq_compat as tc
from tests.helpers.lstm_flow import (
    DEQUANTIZE,
    FX,
    HIDDEN,
    INPUTS,
    OURS,
    QUANTIZE,
    Constructors,
    Engine,
    MyModel,
    QParams,
    backend_with_32_bits,
    batches_of,
    build,
    documented,
    fixed,
    part_qparams,
    qparams_of,
    quantize_behind,
    run_flow,
    user_classes,
)
from tests.helpers.once import made_once
from tests.helpers.oracle import calibrate, leaves, sqnr
from tests.parity.fx_parts import FLOWS, MEASURED, PROJECTIONS, Flow, fx_flow
from tests.parity.fx_results import PARTS as FX_PARTS
from tests.parity.fx_results import stored
from torchq_compat import lstm_utils, profiles
from torchq_compat.modules.parts import part_nodes

SIGMOIDS = ("input_gate", "forget_gate", "output_gate")
CELL_STATE = ("fgate_cx", "igate_cgate", "fgate_cx_igate_cgate")
PARTS = ("igates", "hgates", "gates", *SIGMOIDS, "cell_gate", *CELL_STATE, "tanh_cy", "ogate_cy")
GATES = ("input", "forget", "cell", "output")


# The flow as torch.ao documents it.


#: The qparams of that flow part by part; tanh(c) has no constructor there and follows the QConfig: FX's 8-bit
#: tanh.
DOCUMENTED_PARTS: dict[str, QParams] = {
    "gates": (2**-11, 2**15, torch.int32),
    **dict.fromkeys(SIGMOIDS, (2**-16, 0, torch.int32)),
    "cell_gate": (2**-15, 2**15, torch.int32),
    **dict.fromkeys(CELL_STATE, (2**-11, 0, torch.int32)),
    "tanh_cy": (2**-7, 2**7, torch.uint8),
    "ogate_cy": (2**-7, 2**7, torch.uint8),
}


def cells_of(model: nn.Module, path: str = "my_lstm") -> Iterator[tuple[str, GraphModule]]:
    """Yield the cells of the LSTM at ``path`` with their paths."""
    for name, module in model.named_modules():
        if re.fullmatch(rf"{path}\.layers\.\d+\.layer_(fw|bw)\.cell", name):
            assert isinstance(module, GraphModule)
            yield name, module


def quality(model: nn.Module, other: nn.Module, args: tuple[Tensor, ...]) -> list[float]:
    with torch.no_grad():
        return [sqnr(a, b) for a, b in zip(leaves(model(*args)), leaves(other(*args)), strict=True)]


def assert_between(found: list[float], low: float, high: float = 60) -> None:
    assert low < min(found), found
    assert max(found) < high, found


STRUCTURES: dict[str, dict[str, Any]] = {
    "one": {},
    "two_layers": {"num_layers": 2},
    "bidirectional": {"bidirectional": True},
    "batch_first": {"batch_first": True},
    "no_bias": {"bias": False},
    "everything": {"num_layers": 2, "bidirectional": True, "batch_first": True, "bias": False},
}


@dataclass
class Documented:
    """A model, the batches it was calibrated with, unseen arguments, and what the flow made of it.

    Tests call ``prepared``, so its observers have seen more than the batches ``converted`` was made from.
    """

    model: MyModel
    batches: list[tuple[Tensor, Tensor, Tensor]]
    args: tuple[Tensor, Tensor, Tensor]
    prepared: GraphModule
    converted: GraphModule


@made_once
def by_flow(structure: str = "one", *, split_gates: bool = False) -> Documented:
    model = build(gain=2.0, **STRUCTURES[structure])
    batches, args = batches_of(model), model.batch(*MEASURED)
    made = run_flow(OURS, model, batches, split_gates=split_gates, **documented())
    return Documented(model, batches, args, *made)


def assert_equal(model: nn.Module, other: nn.Module, args: tuple[Tensor, ...]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(leaves(model(*args)), leaves(other(*args)), strict=True))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_every_part_has_exactly_the_qparams_given(structure: str) -> None:
    options = STRUCTURES[structure]
    layers = range(options.get("num_layers", 1))
    directions = ("layer_fw", "layer_bw") if options.get("bidirectional") else ("layer_fw",)
    cells = dict(cells_of(by_flow.itself(structure).converted))
    assert list(cells) == [f"my_lstm.layers.{i}.{d}.cell" for i in layers for d in directions]
    for cell in cells.values():
        found = part_qparams(cell)
        assert set(found) == set(PARTS)
        assert {name: found[name] for name in DOCUMENTED_PARTS} == DOCUMENTED_PARTS
        for name in ("igates", "hgates"):
            scale, zero_point, dtype = found[name]
            assert dtype is torch.uint8
            assert 0.002 < scale < 0.05
            assert 90 < zero_point < 166
        # One quantize per part and no others: no second pair, and none at the inputs.
        assert sum(node.target is QUANTIZE for node in cell.graph.nodes) == len(PARTS)


def assert_as_fx(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Assert that no output is less accurate than FX's and that projections have FX's calibrated qparams."""
    for mine, of_fx in zip(ours["sqnr"], theirs["sqnr"], strict=True):
        assert of_fx > 30
        assert of_fx - 0.5 <= mine < 60
    assert ours["projections"].keys() == theirs["projections"].keys()
    for path, parts in theirs["projections"].items():
        assert parts.keys() == ours["projections"][path].keys() == set(PROJECTIONS)
        for part, (scale, zero_point) in parts.items():
            assert ours["projections"][path][part] == [pytest.approx(scale, rel=1e-6), zero_point]


@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.id)
def test_as_fx_was(flow: Flow) -> None:
    made = by_flow.itself(flow.structure, split_gates=flow.split_gates)
    projections = {
        path: {part: list(part_qparams(cell)[part][:2]) for part in PROJECTIONS}
        for path, cell in cells_of(made.converted)
        if not flow.split_gates
    }
    found = {"sqnr": quality(made.model, made.converted, made.args), "projections": projections}
    assert_as_fx(found, stored(FX_PARTS)[flow.id])


@pytest.mark.parametrize(
    "flow",
    [pytest.param(flow, marks=[] if flow is FLOWS[2] else [pytest.mark.slow]) for flow in FLOWS],
    ids=lambda flow: flow.id,
)
def test_fx_is_as_it_was(flow: Flow) -> None:
    """A live run gives the stored results: ``python -m tests.parity``."""
    live, before = fx_flow(flow), stored(FX_PARTS)[flow.id]
    assert live["sqnr"] == pytest.approx(before["sqnr"], abs=0.1)
    assert live["projections"].keys() == before["projections"].keys()
    for path, parts in live["projections"].items():
        for part, qparams in parts.items():
            assert qparams == pytest.approx(before["projections"][path][part], rel=1e-5)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_accuracy_in_every_structure(structure: str) -> None:
    made = by_flow.itself(structure)
    assert_between(quality(made.model, made.converted, made.args), 31)


# FX's own decomposed form, which a PT2E user would start from.


def float_cell(model: MyModel) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    cell = nn.LSTMCell(INPUTS, HIDDEN)
    cell.load_state_dict({name.removesuffix("_l0"): p for name, p in model.my_lstm.state_dict().items()})
    return lambda x, h, c: cell(x, (h, c))


def test_the_decomposed_cell_of_fx_gives_zeros_and_ours_does_not() -> None:
    """A FixedQParamsObserver of any dtype has the range 0..255, and the decomposed quantize clamps to it: the
    gates' zero point of 2^15 alone makes every gate sum -15.9."""
    made = by_flow.itself()
    model, ours = made.model, made.converted
    fx_prepared, _ = run_flow(FX, model, made.batches, **documented())
    fx_cell = fx._convert_to_reference_decomposed_fx(
        copy.deepcopy(fx_prepared.get_submodule("my_lstm.layers.0.layer_fw.cell")),
        backend_config=backend_with_32_bits(),
    )
    x, h, c = torch.randn(32, INPUTS), torch.rand(32, HIDDEN), torch.randn(32, HIDDEN)
    with torch.no_grad():
        exact = float_cell(model)(x, h, c)
        mine = ours.get_submodule("my_lstm.layers.0.layer_fw.cell")(x, h, c)
        of_fx = fx_cell(x, (h, c))
    assert torch.count_nonzero(of_fx[0]) == 0
    assert sqnr(exact[1], of_fx[1]) < 1
    assert float(exact[0].abs().max()) > 0.5
    assert all(30 < sqnr(a, b) < 60 for a, b in zip(exact, mine, strict=True))


def test_fx_leaves_legacy_quantized_tensors_in_the_decomposed_model_and_we_do_not() -> None:
    made = by_flow.itself()
    ours = made.converted
    decomposing = Engine(fx_lstm_utils, fx.prepare_fx, fx._convert_to_reference_decomposed_fx)
    _, theirs = run_flow(decomposing, made.model, made.batches, **documented())
    (fx_cell,) = [m for name, m in theirs.named_modules() if name.endswith("layer_fw.cell")]
    assert sum(n.target is torch.quantize_per_tensor for n in fx_cell.graph.nodes) > len(PARTS)
    (cell,) = [cell for _, cell in cells_of(ours)]
    for graph_module in (ours, cell):
        calls = [n for n in graph_module.graph.nodes if n.op == "call_function"]
        assert calls
        assert {str(getattr(n.target, "namespace", n.target.__name__)) for n in calls} <= {
            "aten",
            "quantized_decomposed",
            "getitem",
        }


# What the classes of a script may rely on.


@pytest.mark.parametrize("structure", ["one", "bidirectional"])
def test_instances_of_the_legacy_classes(structure: str) -> None:
    made = by_flow.itself(structure)
    assert isinstance(made.prepared.get_submodule("my_lstm"), torch.ao.nn.quantizable.LSTM)
    assert isinstance(made.converted.get_submodule("my_lstm"), torch.ao.nn.quantized.LSTM)
    assert not isinstance(made.model.my_lstm, torch.ao.nn.quantizable.LSTM)


def test_legacy_names_and_signatures() -> None:
    for name in ("get_lstm_with_individually_observed_parts", "get_reference_quantized_lstm_module"):
        ours, theirs = getattr(lstm_utils, name), getattr(fx_lstm_utils, f"_{name}")
        assert getattr(lstm_utils, f"_{name}") is ours
        parameters = list(inspect.signature(ours).parameters.values())
        legacy = list(inspect.signature(theirs).parameters.values())
        positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert [p.name for p in positional] == [p.name for p in legacy]
        for mine, of_fx in zip(positional, legacy, strict=True):
            assert mine.default == of_fx.default or (mine.name, mine.default) == ("example_inputs", None)
    keyword_only = {
        p.name
        for p in inspect.signature(lstm_utils.get_lstm_with_individually_observed_parts).parameters.values()
        if p.kind is p.KEYWORD_ONLY
    }
    assert keyword_only >= {
        "igates_obs_ctr",
        "hgates_obs_ctr",
        "tanh_cell_state_obs_ctr",
        "weight_obs_ctr",
        "sigmoid_input_obs_ctr",
        "tanh_input_obs_ctr",
    }


def test_example_inputs_are_not_needed() -> None:
    given = by_flow.itself()
    _, omitted = run_flow(OURS, given.model, given.batches, give_examples=False, **documented())
    assert_equal(given.converted, omitted, given.model.batch(9, 4))


def test_on_ones_own_without_a_model() -> None:
    """The two functions alone, as an eager script calls them."""
    model = build(gain=2.0, bidirectional=True)
    model.my_lstm.qconfig = get_default_qconfig_mapping("qnnpack").global_qconfig
    observed = lstm_utils.get_lstm_with_individually_observed_parts(model.my_lstm, **documented())
    for x, h, c in batches_of(model):
        observed(x, (h, c))
    converted = lstm_utils.get_reference_quantized_lstm_module(observed)
    x, h, c = model.batch(9, 32)
    with torch.no_grad():
        exact, fake, mine = (leaves(run(x, (h, c))) for run in (model.my_lstm, observed, converted))
    for a, b, m in zip(exact, fake, mine, strict=True):
        assert float((a - b).abs().max()) < 1e-5
        assert 30 < sqnr(a, m) < 60


MAPPINGS: dict[str, Callable[[type, type], dict[type, type] | None]] = {
    "base_to_user": lambda observed, quantized: {torch.ao.nn.quantizable.LSTM: quantized},
    "user_to_user": lambda observed, quantized: {observed: quantized},
    "base_to_stock": lambda observed, quantized: {torch.ao.nn.quantizable.LSTM: torch.ao.nn.quantized.LSTM},
    "user_to_stock": lambda observed, quantized: {observed: torch.ao.nn.quantized.LSTM},
    "none": lambda observed, quantized: None,
}


@made_once
def prepared_with_a_users_class() -> tuple[type[nn.Module], type[nn.Module], GraphModule]:
    given = by_flow.itself()
    observed, quantized = user_classes(lstm_utils, **documented())
    config = PrepareCustomConfig().set_float_to_observed_mapping(nn.LSTM, observed)
    prepared = tc.prepare_fx(given.model, get_default_qconfig_mapping("qnnpack"), given.batches[0], config)
    calibrate(prepared, given.batches)
    return observed, quantized, prepared


@pytest.mark.parametrize("make_mapping", MAPPINGS.values(), ids=MAPPINGS.keys())
def test_every_convert_mapping_gives_the_converted_lstm(
    make_mapping: Callable[[type, type], dict[type, type] | None],
) -> None:
    observed, quantized, prepared = prepared_with_a_users_class()
    mapping = make_mapping(observed, quantized)
    converted = tc.convert_fx(
        prepared,
        None if mapping is None else {"observed_to_quantized_custom_module_class": {"static": mapping}},
    )
    (cell,) = [cell for _, cell in cells_of(converted)]
    assert {name: part_qparams(cell)[name] for name in DOCUMENTED_PARTS} == DOCUMENTED_PARTS
    assert sorted(tuple(b.shape) for b in cell.buffers() if b.dtype is torch.int8) == [
        (4 * HIDDEN, INPUTS),
        (4 * HIDDEN, HIDDEN),
    ]
    reference = by_flow.itself()
    assert_equal(converted, reference.converted, reference.model.batch(9, 4))


# As many q-dq pairs as the dtypes require.

TRANSPARENT = (torch.ops.aten.chunk.default, operator.getitem)


def reader_chain(node: Node) -> list[Any]:
    """Return the targets behind ``node`` up to the next op of the cell, following the first reader."""
    chain: list[Any] = []
    while node.users:
        node = next(iter(node.users))
        if node.target is QUANTIZE:
            chain.append(node.args[5])
        elif node.target is not DEQUANTIZE and node.target not in TRANSPARENT:
            chain.append(node.target)
            break
    return chain


def test_hidden_state_of_another_dtype_is_quantized_again_before_the_projection() -> None:
    """ogate_cy -> q(int16) -> dq -> [next step, next layer] -> q(uint8) -> dq -> hgates, igates."""
    model = build(2, gain=2.0)
    parts = {**documented(), "hidden_state_obs_ctr": fixed(2**-15, 0, torch.int16)}
    _, converted = run_flow(OURS, model, batches_of(model), backend_config=None, **parts)
    for index, (_, cell) in enumerate(cells_of(converted)):
        found = part_qparams(cell)
        assert found["ogate_cy"] == (2**-15, 0, torch.int16)
        assert reader_chain(dict(part_nodes(cell))["ogate_cy"]) == [torch.int16, "output"]
        inputs = {node.target: node for node in cell.graph.nodes if node.op == "placeholder"}
        assert reader_chain(inputs["hx"]) == [torch.uint8, torch.ops.aten.linear.default]
        # The first layer's x is already uint8; the second layer's x is the first one's hidden state.
        expected = [torch.uint8] if index else []
        assert reader_chain(inputs["x"]) == [*expected, torch.ops.aten.linear.default]
        assert sum(node.target is QUANTIZE for node in cell.graph.nodes) == len(PARTS) + 1 + index
    output, *_ = quality(model, converted, model.batch(9, 64))
    assert 32 < output < 60


def test_hidden_state_of_the_projections_dtype_is_not() -> None:
    for _, cell in cells_of(by_flow.itself("two_layers").converted):
        for node in cell.graph.nodes:
            if node.op == "placeholder" and node.target in ("x", "hx"):
                assert reader_chain(node) == [torch.ops.aten.linear.default]


@pytest.mark.parametrize("split_gates", [False, True])
def test_gate_inputs_apart_from_gate_sums(split_gates: bool) -> None:
    """gates -> q(int32) -> dq -> q(uint8) -> dq -> sigmoid, and q(int16) for tanh."""
    model = build(gain=2.0)
    sigmoid_input, tanh_input = (16 / 256, 128, torch.quint8), (2**-12, 0, torch.int16)
    _, converted = run_flow(
        OURS,
        model,
        batches_of(model),
        backend_config=None,
        split_gates=split_gates,
        sigmoid_input_obs_ctr=fixed(*sigmoid_input),
        tanh_input_obs_ctr=fixed(*tanh_input),
        **documented(),
    )
    (cell,) = [cell for _, cell in cells_of(converted)]
    nodes = dict(part_nodes(cell))
    for gate in GATES:
        expected = (2**-12, 0, torch.int16) if gate == "cell" else (16 / 256, 128, torch.uint8)
        (dequantize,) = nodes[f"{gate}_gate"].all_input_nodes
        quantize = dequantize.args[0]
        assert quantize.target is QUANTIZE
        assert qparams_of(quantize) == expected
    # Behind the sums, too, the qparams are as given: two pairs between two neighbouring ops.
    sums = [node for name, node in nodes.items() if name.split(".")[0] == "gates"]
    assert len(sums) == (4 if split_gates else 1)
    assert {qparams_of(quantize_behind(node)) for node in sums} == {(2**-11, 2**15, torch.int32)}
    assert sum(node.target is QUANTIZE for node in cell.graph.nodes) == len(nodes) + 4
    assert quality(model, converted, model.batch(9, 64))[0] > 25


def test_no_gate_input_is_quantized_where_no_constructor_asks_for_it() -> None:
    (cell,) = [cell for _, cell in cells_of(by_flow.itself().converted)]
    nodes = dict(part_nodes(cell))
    assert reader_chain(nodes["gates"]) == [torch.int32, torch.ops.aten.sigmoid.default]
    for gate in GATES:
        (source,) = nodes[f"{gate}_gate"].all_input_nodes
        assert source.target is operator.getitem


#: The range of every group, in floats.
RANGES = {
    "linear_output_obs_ctr": (-8.0, 8.0),
    "sigmoid_obs_ctr": (0.0, 1.0),
    "tanh_obs_ctr": (-1.0, 1.0),
    "tanh_cell_state_obs_ctr": (-1.0, 1.0),
    "cell_state_obs_ctr": (-4.0, 4.0),
    "hidden_state_obs_ctr": (-1.0, 1.0),
}
GROUPS = {
    "linear_output_obs_ctr": ("gates",),
    "sigmoid_obs_ctr": SIGMOIDS,
    "tanh_obs_ctr": ("cell_gate",),
    "tanh_cell_state_obs_ctr": ("tanh_cy",),
    "cell_state_obs_ctr": CELL_STATE,
    "hidden_state_obs_ctr": ("ogate_cy",),
}


def covering(low: float, high: float, dtype: torch.dtype, bits: int) -> tuple[float, int]:
    """Return the (scale, zero point) that spread [low, high) over the 2^bits values of ``dtype``."""
    scale = (high - low) / 2**bits
    lowest = -(2 ** (bits - 1)) if torch.iinfo(dtype).min < 0 else 0
    return scale, lowest - round(low / scale)


@pytest.mark.parametrize(
    ("legacy", "dtype", "bits", "bar"),
    [
        (torch.quint8, torch.uint8, 8, 25),
        (torch.qint8, torch.int8, 8, 25),
        (torch.qint32, torch.int32, 16, 33),
        (torch.int16, torch.int16, 16, 33),
        (torch.uint16, torch.uint16, 16, 33),
    ],
    ids=["quint8", "qint8", "qint32", "int16", "uint16"],
)
def test_every_integer_dtype(legacy: torch.dtype, dtype: torch.dtype, bits: int, bar: float) -> None:
    model = build(gain=2.0, bidirectional=bits == 8)
    qparams = {name: covering(*RANGES[name], dtype, bits) for name in RANGES}
    constructors = {name: fixed(*qparams[name], legacy) for name in RANGES}
    _, converted = run_flow(OURS, model, batches_of(model), backend_config=None, **constructors)
    for _, cell in cells_of(converted):
        found = part_qparams(cell)
        for name, parts in GROUPS.items():
            assert {found[part] for part in parts} == {(*qparams[name], dtype)}
    assert_between(quality(model, converted, model.batch(9, 64)), bar)


# split_gates.


class Shapes(Interpreter):
    """Runs a graph and collects the shape of every tensor in it, including parameters and constants."""

    def __init__(self, graph_module: GraphModule) -> None:
        super().__init__(graph_module)
        self.seen: set[tuple[int, ...]] = set()

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        self.seen.update(tuple(leaf.shape) for leaf in leaves(result))
        return result


def widths(cell: GraphModule) -> set[int]:
    shapes = Shapes(cell)
    inputs = [int(node.meta["val"].shape[1]) for node in cell.graph.nodes if node.op == "placeholder"]
    with torch.no_grad():
        shapes.run(*(torch.randn(3, width) for width in inputs))
    recorded = [leaf.shape for n in cell.graph.nodes for leaf in leaves(n.meta.get("val"))]
    assert recorded
    return {size for shape in (*shapes.seen, *recorded) for size in shape if isinstance(size, int)}


@pytest.mark.parametrize("structure", ["one", "two_layers", "no_bias", "everything"])
def test_split_gates(structure: str) -> None:
    whole, split = by_flow.itself(structure), by_flow.itself(structure, split_gates=True)
    for made, is_split in ((whole, False), (split, True)):
        for _, cell in (*cells_of(made.prepared), *cells_of(made.converted)):
            assert (4 * HIDDEN in widths(cell)) is not is_split
            names = [name for name, _ in part_nodes(cell)]
            for part in ("igates", "hgates", "gates"):
                own = [f"{part}.{gate}" for gate in GATES] if is_split else [part]
                assert [name for name in names if name.split(".")[0] == part and name in own] == own
            linears = [n for n in cell.graph.nodes if n.target is torch.ops.aten.linear.default]
            assert len(linears) == (8 if is_split else 2)
            assert len(names) == len(set(names)) == len(PARTS) + (9 if is_split else 0)
    with torch.no_grad():
        exact, mine = (leaves(run(*split.args)) for run in (split.model, split.prepared))
    for a, b in zip(exact, mine, strict=True):
        assert float((a - b).abs().max()) < 1e-5
    assert_between(quality(split.model, split.converted, split.args), 31)


def test_split_gates_have_observers_of_their_own() -> None:
    """One set of qparams for four gates of very different size costs accuracy that four sets do not."""
    model = build(bias=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter[2 * HIDDEN : 3 * HIDDEN].mul_(0.05)
    found = {}
    for split_gates in (False, True):
        _, converted = run_flow(OURS, model, batches_of(model), split_gates=split_gates, **documented())
        (cell,) = [cell for _, cell in cells_of(converted)]
        found[split_gates] = part_qparams(cell)
    ratio = found[True]["igates.cell"][0] / found[False]["igates"][0]
    assert 0.03 < ratio < 0.07
    assert len({found[True][f"igates.{gate}"][0] for gate in GATES}) == 4


# Ready profiles.

INT8_ACTIVATIONS = {
    **dict.fromkeys(SIGMOIDS, (1 / 256, 0, torch.uint8)),
    **dict.fromkeys(("cell_gate", "tanh_cy"), (2 / 256, 128, torch.uint8)),
}
INT16_CELL = {
    **dict.fromkeys(("igates", "hgates", "gates"), (2**-12, 0, torch.int16)),
    **dict.fromkeys((*SIGMOIDS, "cell_gate", "tanh_cy"), (2**-15, 0, torch.int16)),
}


@dataclass(frozen=True)
class Profile:
    """A profile, the parts it fixes, the dtypes of those it leaves to calibration, and its accuracy."""

    make: Callable[..., Constructors]
    fixed_parts: dict[str, QParams]
    calibrated: dict[str, torch.dtype]
    bar: float

    def __str__(self) -> str:
        return self.make.__name__


PROFILES = [
    Profile(
        profiles.int8_parts,
        INT8_ACTIVATIONS,
        dict.fromkeys(("igates", "hgates", "gates", *CELL_STATE, "ogate_cy"), torch.uint8),
        25,
    ),
    Profile(profiles.int16_parts, DOCUMENTED_PARTS, dict.fromkeys(("igates", "hgates"), torch.uint8), 30),
    Profile(
        profiles.int8_with_int16_cell,
        INT16_CELL,
        {**dict.fromkeys(CELL_STATE, torch.int16), "ogate_cy": torch.uint8},
        33,
    ),
]


@made_once
def by_profile(
    make: Callable[..., Constructors], *, split_gates: bool = False
) -> tuple[MyModel, GraphModule, GraphModule]:
    model = build(gain=2.0, bidirectional=True)
    options = {"backend_config": None, "split_gates": split_gates}
    return model, *run_flow(OURS, model, batches_of(model), **options, **make())


@pytest.mark.parametrize("split_gates", [False, True])
@pytest.mark.parametrize("profile", PROFILES, ids=str)
def test_profile(profile: Profile, split_gates: bool) -> None:
    model, _, converted = by_profile.itself(profile.make, split_gates=split_gates)
    for _, cell in cells_of(converted):
        for name, found in part_qparams(cell).items():
            part = name.split(".")[0]
            if part in profile.fixed_parts:
                assert found == profile.fixed_parts[part]
            else:
                assert found[2] is profile.calibrated[part]
    assert_between(quality(model, converted, model.batch(9, 64)), profile.bar)


def test_the_documented_profile_is_the_documented_flow() -> None:
    by_hand = by_flow.itself()
    _, ready = run_flow(OURS, by_hand.model, by_hand.batches, **profiles.int16_parts())
    assert_equal(by_hand.converted, ready, by_hand.model.batch(9, 8))


def test_the_int16_cell_state_lies_on_the_smallest_power_of_two_that_covers_it() -> None:
    _, prepared, converted = by_profile.itself(profiles.int8_with_int16_cell)
    for (_, observed), (_, cell) in zip(cells_of(prepared), cells_of(converted), strict=True):
        nodes = dict(part_nodes(observed))
        for name in CELL_STATE:
            (reader,) = nodes[name].users
            observer = observed.get_submodule(str(reader.target))
            largest = max(float(observer.max_val) / 32767, float(-observer.min_val) / 32768)
            scale, zero_point, _ = part_qparams(cell)[name]
            assert zero_point == 0
            assert torch.frexp(torch.tensor(scale)).mantissa == 0.5
            assert scale / 2 < largest <= scale


@pytest.mark.parametrize("profile", PROFILES, ids=str)
def test_profiles_for_training_hold_fake_quantizes(profile: Profile) -> None:
    for_calibration, for_training = profile.make(), profile.make(fake_quantize=True)
    assert for_calibration.keys() == for_training.keys()
    for name, constructor in for_training.items():
        assert isinstance(constructor(), FakeQuantizeBase)
        assert not isinstance(for_calibration[name](), FakeQuantizeBase)
