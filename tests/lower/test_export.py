"""``torchq_compat.export``: one program in three shapes, with the bits of the converted model, int8 weights.

The opaque shape calls the operator that lowered modules call, so its bits are theirs.
"""

from __future__ import annotations

import copy
import functools
import io
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import get_default_qconfig_mapping
from torch.ao.quantization.fx.custom_config import ConvertCustomConfig, PrepareCustomConfig
from torch.ao.quantization.quant_type import QuantType
from torch.export import Dim, ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.nn.utils.rnn import pack_padded_sequence

import torchq_compat as tc
from tests.helpers.exported_models import DYNAMIC, STATIC, Alone, converted_alone, converted_to_reference
from tests.helpers.lstm_flow import OURS, batches_of, build, documented, run_flow
from tests.helpers.oracle import calibrate, leaves, sqnr
from tests.helpers.warm_python import warm_python
from torchq_compat.errors import ExportError, InputError, QuantizationWarning, TorchQCompatError
from torchq_compat.model.graph_module import ConvertedGraphModule
from torchq_compat.modules.parts import PartOwner
from torchq_compat.recurrent.kernel.program import QPARAMS_COLUMNS, Boundary, ModuleNumbers
from torchq_compat.recurrent.over_time import LoopShape, NativeRunner
from torchq_compat.recurrent.recurrent_module import RecurrentModule

OPS = torch.ops.quantized_decomposed
Q_DQ = (OPS.quantize_per_tensor.default, OPS.dequantize_per_tensor.default)
SCAN = torch.ops.higher_order.scan
LINEAR = torch.ops.aten.linear.default
FREE = (LoopShape.ROLLED, LoopShape.OPAQUE)


class Chain(nn.Module):
    """An LSTM and an RNN in a chain; the tuple of the first is returned whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LSTM(8, 6, bidirectional=True)
        self.second = nn.RNN(12, 5, bidirectional=True)
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Any:
        first = self.first(x)
        y, (h, _) = self.second(first[0])
        return self.head(y), first, h[-1]


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTMCell(8, 6)
        self.gru = nn.GRUCell(6, 5)

    def forward(self, x: Tensor) -> Any:
        h, c = self.lstm(x[0])
        return self.gru(h), c


class Speech(nn.Module):
    """Convolution, LSTM, attention, head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(8, 12, 3, padding=1)
        self.lstm = nn.LSTM(12, 8, batch_first=True, bidirectional=True)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.conv(x.transpose(1, 2))).transpose(1, 2)
        x, _ = self.lstm(x)
        x, _ = self.attention(x, x, x, need_weights=False)
        return self.head(x)


ALONE = ("lstm", "projected", "gru", "rnn", "dynamic")
COMPOSED: dict[str, Callable[[], nn.Module]] = {"chain": Chain, "cells": Cells, "speech": Speech}
MODELS = (*ALONE, *COMPOSED)
#: Of examples of two steps.
UNROLLED_SIZES = {"projected": (3, 2, 8), "gru": (2, 3, 8), "dynamic": (2, 3, 8)}


@functools.cache
def reference(name: str) -> ConvertedGraphModule:
    if name in ALONE:
        return converted_alone(name)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return converted_to_reference(COMPOSED[name](), STATIC)


@functools.cache
def program_of(name: str, shape: str) -> ExportedProgram:
    model = reference(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error", QuantizationWarning)
        x = torch.randn(UNROLLED_SIZES[name] if shape == LoopShape.UNROLLED else (4, 3, 8))
        return tc.export(model, (x,), recurrent=shape)


def computed_by(name: str, shape: str) -> nn.Module:
    """Return a module with the bits of ``program_of(name, shape)``."""
    return natively(reference(name)) if shape == LoopShape.OPAQUE else reference(name)


@functools.cache
def natively(model: ConvertedGraphModule) -> nn.Module:
    """Return the q-dq graph of ``model`` with its recurrent modules in the native operator."""
    natively = GraphModule(model, copy.deepcopy(model.graph))
    for path, module in list(model.named_modules()):
        if isinstance(module, RecurrentModule):
            copied = copy.copy(module)
            copied.runner = functools.partial(NativeRunner, copied.bound())
            natively.set_submodule(path, copied)
    return natively


def assert_same_bits(
    model: nn.Module, program: ExportedProgram, *sizes: tuple[int, int], check_guards: bool = True
) -> None:
    module = program.module(check_guards=check_guards)
    for size in sizes:
        x = torch.randn(*size, 8)
        pairs = list(zip(leaves(model(x)), leaves(module(x)), strict=True))
        assert all(torch.equal(mine, theirs) for mine, theirs in pairs), size


def saved_and_loaded(program: ExportedProgram) -> ExportedProgram:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


# The numbers.


@pytest.mark.parametrize("shape", FREE)
@pytest.mark.parametrize("name", MODELS)
def test_the_bits_of_the_reference_at_any_size(name: str, shape: str) -> None:
    # torch guards against sizes of 1 where an op of the model reads a transposed tensor; the op accepts them.
    with_ones, without = ((4, 3), (1, 1), (6, 1), (1, 5)), ((2, 2), (5, 40))
    model, program = computed_by(name, shape), program_of(name, shape)
    if name == "speech":
        assert_same_bits(model, program, *with_ones, check_guards=False)
        assert_same_bits(model, program, *without)
    else:
        assert_same_bits(model, program, *with_ones, *without)
    x = torch.randn(5, 40, 8)
    for exact, found in zip(leaves(reference(name)(x)), leaves(model(x)), strict=True):
        assert sqnr(exact, found) > 40


@pytest.mark.parametrize("name", ["projected", "gru", "dynamic"])
def test_unrolled_at_the_length_of_the_example(name: str) -> None:
    program = program_of(name, "unrolled")
    assert not program.graph.find_nodes(op="call_function", target=SCAN)
    batch_first = name == "projected"
    assert_same_bits(reference(name), program, *([(1, 2), (7, 2)] if batch_first else [(2, 1), (2, 7)]))
    with pytest.raises(AssertionError, match="Guard failed"):
        program.module()(torch.randn(7, 5, 8))


@pytest.mark.parametrize("shape", FREE)
@pytest.mark.parametrize("name", ["rnn", pytest.param("speech", marks=pytest.mark.slow)])
def test_saved_loaded_and_exported_again(name: str, shape: str) -> None:
    loaded, model = saved_and_loaded(program_of(name, shape)), computed_by(name, shape)
    assert_same_bits(model, loaded, (4, 3), (7, 2))
    sizes = {0: Dim("first"), 1: Dim("second")}
    again = torch.export.export(loaded.module(), (torch.randn(4, 5, 8),), dynamic_shapes=(sizes,))
    assert_same_bits(model, saved_and_loaded(again), (4, 3), (7, 2))


def test_a_copy_of_a_dynamic_model_exports_the_same_operator() -> None:
    x = torch.randn(6, 3, 8)
    model = converted_alone("dynamic")
    program, of_copy = (tc.export(each, (x,), recurrent="opaque") for each in (model, copy.deepcopy(model)))
    assert [node.target for node in of_copy.graph.nodes] == [node.target for node in program.graph.nodes]
    assert all(map(torch.equal, leaves(of_copy.module()(x)), leaves(program.module()(x))))


def test_states_given_and_parts_of_16_bits() -> None:
    model = build(bidirectional=True)
    _, converted = run_flow(OURS, model, batches_of(model), **documented())
    for shape in (*FREE, LoopShape.UNROLLED):
        is_native = shape is LoopShape.OPAQUE
        program = tc.export(converted, model.batch(3, 4), recurrent=shape).module()
        for args in [model.batch(3, 5), model.batch(6, 2)][: 1 if shape is LoopShape.UNROLLED else 2]:
            for exact, mine, theirs in zip(
                *(leaves(m(*args)) for m in (model, converted, program)), strict=True
            ):
                assert sqnr(mine, theirs) > 40 if is_native else torch.equal(mine, theirs)
                assert 20 < sqnr(exact, theirs) < 60


class Nested(nn.Module):
    """A dict argument, and an optional state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 5, batch_first=True)

    def forward(self, batch: dict[str, Tensor], state: Any = None) -> Any:
        output, last = self.lstm(batch["x"], state)
        return {"output": output, "last": last}


@pytest.mark.parametrize("with_state", [False, True])
def test_nested_inputs_and_results(with_state: bool) -> None:
    def inputs(size: int, steps: int) -> Any:
        state = (torch.randn(1, size, 5), torch.randn(1, size, 5)) if with_state else None
        return {"x": torch.randn(size, steps, 8)}, state

    torch.manual_seed(0)
    config = tc.get_default_prepare_custom_config()
    prepared = tc.prepare_fx(Nested().eval(), STATIC, inputs(3, 6), config)
    calibrate(prepared, [inputs(8, 9)])
    converted = tc.convert_to_reference_fx(prepared)
    for shape in FREE:
        program, args = tc.export(converted, inputs(3, 6), recurrent=shape).module(), inputs(2, 9)
        expected = (natively(converted) if shape == LoopShape.OPAQUE else converted)(*args)
        found = program(*args)
        assert list(found) == ["output", "last"]
        assert all(map(torch.equal, leaves(found), leaves(expected)))


# The contents of the program.


def graphs_of(program: ExportedProgram) -> Iterator[Graph]:
    for module in program.graph_module.modules():
        if isinstance(module, GraphModule):
            yield module.graph


def opaque_op() -> Any:
    return torch.ops.torchq_compat_native.recurrent.default


def qparams_in(graphs: Iterator[Graph]) -> set[tuple[Any, ...]]:
    return {node.args[1:6] for graph in graphs for node in graph.nodes if node.target in Q_DQ}


@pytest.mark.parametrize("name", ["gru", "projected"])
def test_every_shape_has_the_qparams_of_the_cells(name: str) -> None:
    model = reference(name)
    cells = [graph.graph for m in model.modules() if isinstance(m, PartOwner) for _, graph in m.graphs()]
    expected = qparams_in(iter((model.graph, *cells)))
    assert len(expected) > 10
    for shape in (LoopShape.ROLLED, LoopShape.UNROLLED):
        assert qparams_in(graphs_of(program_of(name, shape))) == expected


@pytest.mark.parametrize("name", ["gru", "projected"])
def test_the_numbers_of_the_operator_are_the_qparams_of_the_cells(name: str) -> None:
    model, program = reference(name), program_of(name, "opaque")
    cells = [graph.graph for m in model.modules() if isinstance(m, PartOwner) for _, graph in m.graphs()]
    (call,) = program.graph.find_nodes(op="call_function", target=opaque_op())
    (tensor,) = (value for value in program.constants.values() if value.dtype is torch.float64)
    numbers = ModuleNumbers.of(tensor)
    x_qparams = Boundary.of(call.args[4], numbers.states).columns[1:3]
    assert x_qparams in {tuple(map(float, args[:2])) for args in qparams_in(iter((model.graph,)))}
    found: set[tuple[float, ...]] = set()
    for cell in (cell for layer in numbers.layers for cell in layer):
        for row in cell.constants.tolist():
            found |= {tuple(row[at : at + 2]) for at in (0, QPARAMS_COLUMNS, 2 * QPARAMS_COLUMNS) if row[at]}
    in_cells = {tuple(map(float, args[:2])) for args in qparams_in(iter(cells))}
    assert len(in_cells) > 10
    assert found - in_cells <= {(1.0, 0.0)}
    assert in_cells <= found


@pytest.mark.parametrize("name", ["lstm", "projected", "gru"])
def test_the_input_projection_is_one_quantized_linear_outside_the_loop(name: str) -> None:
    program = program_of(name, "rolled")
    scans = program.graph.find_nodes(op="call_function", target=SCAN)
    projections = program.graph.find_nodes(op="call_function", target=LINEAR)
    assert len(projections) == len(scans) == len(list(reference(name).rnn.cells()))
    weights = program.graph_signature.inputs_to_buffers
    for scan, linear in zip(scans, projections, strict=True):
        x, weight, _ = linear.args
        sources = x.args[0] if x.target is torch.ops.aten.cat.default else [x]
        assert all(source.target is Q_DQ[1] for source in (*sources, weight))
        assert weights[weight.args[0].name].endswith("._frozen_param0")
        assert [user.target for user in linear.users] == [Q_DQ[0]]
        body_node, _, xs, additional = scan.args
        assert xs[0].meta["val"].shape[-1] == linear.meta["val"].shape[-1]
        assert weight.args[0] not in additional
        body = program.graph_module.get_submodule(str(body_node.target)).graph
        in_body = body.find_nodes(op="call_function", target=LINEAR)
        assert len(in_body) == (2 if name == "projected" else 1)


@pytest.mark.parametrize("name", ["lstm", "chain", "speech"])
def test_no_activation_is_quantized_per_channel(name: str) -> None:
    per_channel = (OPS.quantize_per_channel.default, OPS.dequantize_per_channel.default)
    inside = [n for n in reference(name).graph.nodes if n.target in per_channel and not is_weight(n)]
    assert inside or name == "speech"
    for shape in FREE:
        program = program_of(name, shape)
        assert not [n for g in graphs_of(program) for n in g.nodes if n.target in per_channel]


def is_weight(node: Node) -> bool:
    source = node.args[0]
    return isinstance(source, Node) and source.op == "get_attr"


@pytest.mark.parametrize("name", ["lstm", "gru", "speech"])
def test_nothing_cancels(name: str) -> None:
    """No casts, no quantize right behind a dequantize with equal qparams, no transpose of a transpose."""
    for node in program_of(name, "rolled").graph.nodes:
        source = node.args[0] if node.args and isinstance(node.args[0], Node) else None
        assert node.target is not torch.ops.aten.to.dtype
        if source is not None and node.target is Q_DQ[0]:
            assert source.target is not Q_DQ[1] or source.args[1:] != node.args[1:]
        if source is not None and node.target is torch.ops.aten.transpose.int:
            assert source.target is not node.target


@pytest.mark.parametrize("shape", FREE)
def test_the_program_does_not_grow_with_the_length(shape: str) -> None:
    program = tc.export(reference("rnn"), (torch.randn(64, 3, 8),), recurrent=shape)
    short, long = (
        sum(len(graph.nodes) for graph in graphs_of(each)) for each in (program_of("rnn", shape), program)
    )
    assert short == long


def test_opaque_is_one_call_for_each_module() -> None:
    for name, calls in {"lstm": 1, "chain": 2, "cells": 2, "dynamic": 1}.items():
        program = program_of(name, "opaque")
        assert len(program.graph.find_nodes(op="call_function", target=opaque_op())) == calls
        assert not program.graph.find_nodes(op="call_function", target=SCAN)


def test_weights_are_stored_as_int8() -> None:
    model, x = Alone(nn.LSTM(256, 512)).eval(), torch.randn(3, 2, 256)
    prepared = tc.prepare_fx(model, STATIC, (x,), tc.get_default_prepare_custom_config())
    calibrate(prepared, [(torch.randn(3, 2, 256),)])
    converted = tc.convert_to_reference_fx(prepared)
    floats = sum(parameter.numel() * 4 for parameter in model.parameters())
    for shape in FREE:
        file = io.BytesIO()
        torch.export.save(tc.export(converted, (x,), recurrent=shape), file)
        assert 0.25 < len(file.getvalue()) / floats <= 0.30, shape


def test_the_parameters_of_a_program_want_no_gradient() -> None:
    """A scan with such parameters computes its steps in another way, which changes bits of float results."""
    assert not any(p.requires_grad for p in program_of("dynamic", "rolled").parameters())
    assert any(p.requires_grad for p in reference("dynamic").parameters())


LOADING = """
import sys, torch
assert "torchq_compat.recurrent" not in sys.modules
import torchq_compat.operators
x, expected = torch.load(sys.argv[2])
found = torch.export.load(sys.argv[1]).module()(x)[0]
assert torch.equal(found, expected), "other bits"
"""


def test_loads_in_a_process_of_its_own(tmp_path: Path) -> None:
    x = torch.randn(9, 2, 8)
    torch.export.save(program_of("lstm", "opaque"), tmp_path / "model.pt2")
    torch.save((x, computed_by("lstm", "opaque")(x)[0].detach()), tmp_path / "data.pt")
    ran = warm_python("-c", LOADING, tmp_path / "model.pt2", tmp_path / "data.pt", bare=True)
    assert ran.returncode == 0, ran.stderr


def test_integers_in_and_out() -> None:
    torch.manual_seed(0)
    config = (
        tc.get_default_prepare_custom_config()
        .set_input_quantized_indexes([0])
        .set_output_quantized_indexes([0])
    )
    model = Alone(nn.RNN(8, 12, bidirectional=True)).eval()
    prepared = tc.prepare_fx(model, STATIC, (torch.randn(5, 2, 8),), config)
    calibrate(prepared, [(torch.randn(20, 6, 8),)])
    converted = tc.convert_to_reference_fx(prepared)
    (qparams,) = converted.input_qparams()
    x = qparams.quantize(torch.randn(7, 4, 8))
    expected, found = (leaves(m(x)) for m in (converted, tc.export(converted, (x[:5, :2],)).module()))
    assert [leaf.dtype for leaf in found] == [leaf.dtype for leaf in expected]
    assert all(map(torch.equal, found, expected))


# Sizes.


@pytest.mark.parametrize("shape", FREE)
def test_bounds_of_the_user(shape: str) -> None:
    sizes = ({0: Dim("time", max=20), 1: Dim.AUTO},)
    program = tc.export(reference("rnn"), (torch.randn(6, 3, 8),), recurrent=shape, dynamic_shapes=sizes)
    assert_same_bits(computed_by("rnn", shape), program, (20, 2))
    with pytest.raises(AssertionError, match=r"<= 20"):
        program.module()(torch.randn(21, 3, 8))


def test_an_example_of_one_step_and_one_sequence_fixes_nothing() -> None:
    program = tc.export(reference("rnn"), (torch.randn(1, 1, 8),))
    assert_same_bits(reference("rnn"), program, (1, 1), (7, 4))


# What can go wrong.


def refused(expected: type[TorchQCompatError], *args: Any, **kwargs: Any) -> str:
    before = reference("rnn")(torch.ones(4, 2, 8))[0]
    with pytest.raises(expected) as caught:
        tc.export(*args, **kwargs)
    assert "\nHint: " in str(caught.value)
    assert torch.equal(reference("rnn")(torch.ones(4, 2, 8))[0], before)
    return str(caught.value)


X = torch.randn(6, 3, 8)


def test_only_converted_models() -> None:
    model = Alone(nn.GRU(8, 12)).eval()
    prepared = tc.prepare_fx(model, STATIC, (X,), tc.get_default_prepare_custom_config())
    for wrong in (model, prepared, None, program_of("rnn", "rolled")):
        assert type(wrong).__name__ in refused(ExportError, wrong, (X,))


def test_unknown_shape() -> None:
    message = refused(ExportError, reference("rnn"), (X,), recurrent="folded")
    assert "'folded'" in message
    assert all(repr(shape) in message for shape in ("rolled", "unrolled", "opaque"))
    assert "text" not in message


def test_training_mode() -> None:
    model = reference("rnn").train()
    try:
        assert "eval()" in refused(ExportError, model, (X,))
    finally:
        model.eval()


def test_wrong_example_inputs() -> None:
    model = reference("rnn")
    assert "missing" in refused(InputError, model)
    assert "tuple" in refused(InputError, model, "x")
    assert "arguments" in refused(InputError, model, (X, X))
    assert "fixed to 8" in refused(InputError, model, (torch.randn(6, 3, 9),))
    packed = pack_padded_sequence(X, [6, 4, 1])
    assert "PackedSequence" in refused(InputError, model, (packed,))


def test_a_single_tensor_is_taken_as_the_only_argument() -> None:
    model = reference("rnn")
    with pytest.warns(QuantizationWarning, match="is a single Tensor, taken as the only argument"):
        program = tc.export(model, X)  # type: ignore[arg-type]
    assert torch.equal(program.module()(X)[0], model(X)[0])


def test_wrong_dynamic_shapes() -> None:
    model = reference("rnn")
    too_short = refused(ExportError, model, (X,), dynamic_shapes=({0: Dim("time", max=5)},))
    assert "6 not in range" in too_short
    assert "'width'" in refused(ExportError, model, (X,), dynamic_shapes=({2: Dim("width")},))
    fixed = refused(ExportError, model, (X,), recurrent="unrolled", dynamic_shapes=({0: Dim("time")},))
    assert "fixes the number of steps" in fixed


def test_a_refusal_leaves_other_exports_alone() -> None:
    refused(ExportError, reference("rnn"), (X,), recurrent="unrolled", dynamic_shapes=({0: Dim("t")},))
    program = torch.export.export(reference("rnn"), (X,))
    assert len(program.graph.find_nodes(op="call_function", target=SCAN)) == 2


def test_what_stays_float_is_said_again() -> None:
    torch.manual_seed(0)
    with pytest.warns(QuantizationWarning, match="'rnn' stays float"):
        prepared = tc.prepare_fx(Alone(nn.LSTM(8, 12)).eval(), STATIC, (X,), PrepareCustomConfig())
    calibrate(prepared, [(X,)])
    with pytest.warns(QuantizationWarning, match="computes these in floats: rnn;"):
        tc.export(tc.convert_to_reference_fx(prepared), (X,), dynamic_shapes=({},))


class Relu(nn.Module):
    """A custom module, whose observed class is ObservedRelu."""

    @classmethod
    def from_float(cls, module: nn.Module) -> nn.Module:
        return ObservedRelu()

    def forward(self, x: Tensor) -> Tensor:
        return x.relu()


class ObservedRelu(Relu):
    pass


class SteppingRelu(nn.Module):
    """A module whose code reads the number of steps, which torch.export therefore makes constant."""

    @classmethod
    def from_observed(cls, module: nn.Module) -> nn.Module:
        return cls()

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([step.relu() for step in x])


def test_packed_sequences_of_a_module_that_stays_float() -> None:
    class Packs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.fc = nn.LSTM(6, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
            return self.fc(nn.utils.rnn.pad_packed_sequence(self.encoder(packed)[0])[0])

    args = (torch.randn(6, 3, 6), torch.tensor([4, 6, 2]))
    mapping = get_default_qconfig_mapping("x86").set_object_type(nn.LSTM, None)
    prepared = tc.prepare_fx(Packs().eval(), mapping, args)
    prepared(*args)
    converted = tc.convert_fx(prepared)
    for write in tc.export, tc.to_onnx, tc.to_executorch:
        with pytest.raises(ExportError, match="Hint: 'encoder' stays float and is called with packed seq"):
            write(converted, args)


def test_sizes_that_the_program_fixes_are_said() -> None:
    model = nn.Sequential(nn.Linear(8, 4), Relu()).eval()
    prepare, convert = PrepareCustomConfig(), ConvertCustomConfig()
    prepare.float_to_observed_mapping[QuantType.DYNAMIC] = {Relu: ObservedRelu}
    convert.observed_to_quantized_mapping[QuantType.DYNAMIC] = {ObservedRelu: SteppingRelu}
    prepared = tc.prepare_fx(model, DYNAMIC, (X,), prepare)
    converted = tc.convert_to_reference_fx(prepared, convert)
    assert converted(X[:2]).shape == (2, 3, 4)
    with pytest.warns(QuantizationWarning, match="input in dimension 0 to 6"):
        tc.export(converted, (X,))


def test_a_computed_size_that_the_program_fixes_is_said() -> None:
    class Pools(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(3, 4, 4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            return nn.functional.avg_pool1d(y, y.size(2)).flatten(1)

    model, x = Pools().eval(), torch.randn(2, 3, 16)
    reference = tc.convert_to_reference_fx(tc.prepare_fx(model, torch.ao.quantization.QConfigMapping(), (x,)))
    torch.testing.assert_close(reference(torch.randn(2, 3, 33)).shape, torch.Size([2, 4]))
    with pytest.warns(QuantizationWarning, match=r"leaves free: \(x\.size\(\)\[2\] // 4\) == 4"):
        program = tc.export(reference, (x,)).module()
    with pytest.raises(AssertionError, match="Guard failed"):
        program(torch.randn(2, 3, 33))


def test_nothing_to_say_of_a_model_that_is_as_asked() -> None:
    program = program_of("rnn", LoopShape.ROLLED)  # A warning would be an error there.
    assert_same_bits(reference("rnn"), program, (6, 3))


class AsksForThree(nn.Module):
    """A module whose Python code compares a size that no operator restricts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return torch.relu(y + 1 if x.shape[0] == 3 else y)


def test_a_size_that_python_fixed_is_fixed_in_the_program() -> None:
    torch.manual_seed(0)
    model, x = AsksForThree().eval(), torch.randn(3, 4, 8)
    with pytest.warns(QuantizationWarning, match="is fixed: at 3"):
        prepared = tc.prepare_fx(model, get_default_qconfig_mapping("x86"), (x,))
    prepared(x)
    reference = tc.convert_to_reference_fx(prepared)
    program = tc.export(reference, (x,)).module()
    assert torch.equal(program(x), reference(x))
    longer = torch.randn(3, 6, 8)
    assert torch.equal(program(longer), reference(longer))
    other = torch.randn(6, 4, 8)
    with pytest.raises(InputError, match="dimension 0"):
        reference(other)
    with pytest.raises(AssertionError, match=r"x.size\(\)\[0\] == 3"):
        program(other)
