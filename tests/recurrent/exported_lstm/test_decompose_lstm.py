"""decompose_lstm: an exported LSTM decomposed, in three shapes, under one ordinary quantizer.

Oracles: the float model; and, bit for bit, the shapes among each other.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e.observer import HistogramObserver, MinMaxObserver, PerChannelMinMaxObserver
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer import (
    DerivedQuantizationSpec,
    QuantizationAnnotation,
    QuantizationSpec,
    Quantizer,
)
from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
    X86InductorQuantizer,
    get_default_x86_inductor_quantization_config,
)

from tests.helpers.once import made_once
from tests.helpers.oracle import leaves, sqnr
from torchq_compat.annotate.observed_graph import observer_nodes
from torchq_compat.errors import AnnotationError, QuantizationWarning
from torchq_compat.pt2e import convert_decomposed_lstm, decompose_lstm, prepare_decomposed_lstm
from torchq_compat.recurrent.exported_lstm.whole_op import product_of_scales

ATEN, OPS = torch.ops.aten, torch.ops.quantized_decomposed
SCAN = torch.ops.higher_order.scan
QUANTIZE, DEQUANTIZE = OPS.quantize_per_tensor.default, OPS.dequantize_per_tensor.default
SHAPES = ["rolled", "unrolled", "opaque"]
#: For tests in which several layers and directions make the other shapes slow.
ONE_FAST_SHAPE = ["rolled", *(pytest.param(shape, marks=pytest.mark.slow) for shape in SHAPES[1:])]
INPUT, HIDDEN, STEPS, BATCH = 8, 16, 4, 8

VARIANTS: list[dict[str, Any]] = [
    {},
    {"bias": False},
    {"batch_first": True},
    {"num_layers": 2},
    {"bidirectional": True},
    {"num_layers": 2, "bidirectional": True, "batch_first": True},
    {"num_layers": 2, "bidirectional": True, "proj_size": 4},
]


def slow_but(count: int, *variants: dict[str, Any]) -> list[Any]:
    """Return ``variants`` as test parameters, all but the first ``count`` marked slow."""
    return [
        pytest.param(kwargs, marks=[pytest.mark.slow] * (index >= count), id=str(kwargs))
        for index, kwargs in enumerate(variants)
    ]


BOTH_DIRECTIONS = {"bidirectional": True}


class OfLinears(Quantizer):
    """A quantizer as users write it: linear, add, mul, sigmoid and tanh in int8, with an int32 bias."""

    def __init__(self, observer: Any = MinMaxObserver, *, per_channel: bool = False) -> None:
        super().__init__()
        self.activation = QuantizationSpec(torch.int8, observer, -128, 127, torch.per_tensor_affine)
        self.weight = QuantizationSpec(torch.int8, MinMaxObserver, -127, 127, torch.per_tensor_symmetric)
        if per_channel:
            self.weight = QuantizationSpec(
                torch.int8, PerChannelMinMaxObserver, -127, 127, torch.per_channel_symmetric, ch_axis=0
            )

    def annotate(self, model: GraphModule) -> GraphModule:
        for node in model.graph.nodes:
            specs: dict[Node, Any] = {}
            if node.target is ATEN.linear.default:
                x, weight, *bias = node.args
                specs = {x: self.activation, weight: self.weight}
                if bias:
                    specs[bias[0]] = self.bias_of(node)
            elif node.target in (ATEN.add.Tensor, ATEN.mul.Tensor, ATEN.sigmoid.default, ATEN.tanh.default):
                specs = dict.fromkeys(node.all_input_nodes, self.activation)
            if specs:
                node.meta["quantization_annotation"] = QuantizationAnnotation(
                    input_qspec_map=specs, output_qspec=self.activation, _annotated=True
                )
        return model

    def bias_of(self, linear: Node) -> DerivedQuantizationSpec:
        per_channel = self.weight.ch_axis is not None
        return DerivedQuantizationSpec(
            derived_from=[(linear.args[0], linear), (linear.args[1], linear)],
            derive_qparams_fn=product_of_scales,
            dtype=torch.int32,
            quant_min=-(2**31),
            quant_max=2**31 - 1,
            qscheme=torch.per_channel_symmetric if per_channel else torch.per_tensor_symmetric,
            ch_axis=0 if per_channel else None,
        )

    def validate(self, model: GraphModule) -> None:
        pass


class Model(nn.Module):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.lstm = nn.LSTM(INPUT, HIDDEN, **kwargs)
        directions = 2 if kwargs.get("bidirectional") else 1
        self.head = nn.Linear(directions * (kwargs.get("proj_size", 0) or HIDDEN), 4)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> Any:
        output, (h, c) = self.lstm(x, state)
        return self.head(output), output, h, c


Batch = tuple[Tensor, tuple[Tensor, Tensor]]


def batch(seed: int, kwargs: dict[str, Any], steps: int = STEPS, size: int = BATCH) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    rows = kwargs.get("num_layers", 1) * (2 if kwargs.get("bidirectional") else 1)
    widths = (kwargs.get("proj_size", 0) or HIDDEN, HIDDEN)
    shape = (size, steps, INPUT) if kwargs.get("batch_first") else (steps, size, INPUT)
    h, c = (torch.rand(rows, size, width, generator=generator) - 0.5 for width in widths)
    return torch.randn(shape, generator=generator), (h, c)


def float_model(kwargs: dict[str, Any]) -> Model:
    torch.manual_seed(0)
    return Model(**kwargs).eval()


QUANTIZERS: dict[str, Callable[[], Quantizer]] = {
    "minmax": OfLinears,
    "histogram": lambda: OfLinears(HistogramObserver),
    "per_channel": lambda: OfLinears(per_channel=True),
    "of inputs": lambda: X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config()),
}


@made_once
def exported(*, training: bool = False, **kwargs: Any) -> ExportedProgram:
    return torch.export.export(float_model(kwargs).train(training), batch(0, kwargs))


@made_once
def decomposed_from(shape: str, **kwargs: Any) -> tuple[ExportedProgram, GraphModule]:
    """Return the program as it was left, and what was made of it."""
    program = exported(**kwargs)
    return program, decompose_lstm(program, shape)


@made_once
def calibrated(shape: str, quantizer: str = "minmax", **kwargs: Any) -> GraphModule:
    _, decomposed = decomposed_from.itself(shape, **kwargs)
    return with_ranges(prepare_decomposed_lstm(decomposed, QUANTIZERS[quantizer]()), kwargs)


@made_once
def converted(shape: str, quantizer: str = "minmax", **kwargs: Any) -> GraphModule:
    return convert_decomposed_lstm(calibrated.itself(shape, quantizer, **kwargs))


def with_ranges(prepared: GraphModule, kwargs: dict[str, Any]) -> GraphModule:
    with torch.no_grad():
        for seed in range(4):
            prepared(*batch(seed, kwargs))
    return prepared


def graph_modules(module: nn.Module) -> list[GraphModule]:
    return [m for m in module.modules() if isinstance(m, GraphModule)]


def targets(module: nn.Module) -> list[Any]:
    return [node.target for graph in graph_modules(module) for node in graph.graph.nodes]


def qparams(module: nn.Module) -> set[tuple[Any, ...]]:
    """Return the distinct (scale, zero point, min, max, dtype) of all per-tensor dequantizes."""
    return {
        tuple(node.args[1:6])
        for graph in graph_modules(module)
        for node in graph.graph.nodes
        if node.target is DEQUANTIZE
    }


def run(module: nn.Module, inputs: Batch) -> list[Tensor]:
    with torch.no_grad():
        return leaves(module(*inputs))


# -- float


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kwargs", VARIANTS, ids=str)
def test_the_decomposed_lstm_computes_what_the_program_computed(kwargs: dict[str, Any], shape: str) -> None:
    model = float_model(kwargs)
    program, decomposed = decomposed_from.itself(shape, **kwargs)
    assert str(program.graph) == str(exported.itself(**kwargs).graph)
    assert ATEN.lstm.input not in targets(decomposed)
    assert targets(decomposed).count(ATEN.linear.default) >= 2
    for expected, result in zip(run(model, batch(7, kwargs)), run(decomposed, batch(7, kwargs)), strict=True):
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_from_a_graph_module_which_stays_as_it_is(shape: str) -> None:
    model = float_model({})
    module = exported().module()
    before = module.code
    decomposed = decompose_lstm(module, shape)
    assert module.code == before
    torch.testing.assert_close(run(decomposed, batch(7, {})), run(model, batch(7, {})), rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", ONE_FAST_SHAPE)
def test_unbatched_without_a_state_and_called_twice(shape: str) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(INPUT, INPUT)

        def forward(self, x: Tensor) -> Any:
            output, state = self.lstm(x)
            return self.lstm(output.sin(), state)

    torch.manual_seed(0)
    model, x = Twice().eval(), torch.randn(STEPS, INPUT)
    decomposed = decompose_lstm(torch.export.export(model, (x,)), shape)
    prepared = prepare_decomposed_lstm(decomposed, OfLinears())
    with torch.no_grad():
        expected = leaves(model(x))
        torch.testing.assert_close(leaves(prepared(x)), expected, rtol=0, atol=1e-6)
        results = leaves(convert_decomposed_lstm(prepared)(x))
    for value, result in zip(expected, results, strict=True):
        assert value.shape == result.shape
        assert 25 < sqnr(value, result) < 50


@pytest.mark.parametrize("shape", SHAPES)
def test_dropout_of_a_program_captured_in_training(shape: str) -> None:
    """Everything is dropped between the layers: the second layer sees zeros, as in the float model."""
    kwargs = {"num_layers": 2, "dropout": 1.0}
    model = float_model(kwargs).train()
    decomposed = decompose_lstm(exported(training=True, **kwargs), shape)
    torch.testing.assert_close(
        run(decomposed, batch(7, kwargs)), run(model, batch(7, kwargs)), rtol=0, atol=1e-6
    )


# -- quantized


@pytest.mark.parametrize("kwargs", slow_but(2, *VARIANTS))
def test_three_shapes_have_the_same_qparams_and_bit_equal_results(kwargs: dict[str, Any]) -> None:
    model, inputs = float_model(kwargs), batch(7, kwargs)
    expected = run(model, inputs)
    by_shape = {shape: converted.itself(shape, **kwargs) for shape in SHAPES}
    rolled = by_shape["rolled"]
    assert len(qparams(rolled)) > 12
    for shape in ("unrolled", "opaque"):
        assert qparams(by_shape[shape]) == qparams(rolled)
        for one, other in zip(run(rolled, inputs), run(by_shape[shape], inputs), strict=True):
            assert torch.equal(one, other)
    for value, result in zip(expected, run(rolled, inputs), strict=True):
        assert 25 < sqnr(value, result) < 45


@pytest.mark.parametrize("kwargs", slow_but(1, {}, BOTH_DIRECTIONS))
@pytest.mark.parametrize("quantizer", ["histogram", "per_channel"])
def test_the_same_with_other_observers(quantizer: str, kwargs: dict[str, Any]) -> None:
    """A histogram depends on the order of its inputs: the steps come in the same order in all shapes."""
    inputs = batch(7, kwargs)
    by_shape = [converted.itself(shape, quantizer, **kwargs) for shape in SHAPES]
    assert qparams(by_shape[0]) == qparams(by_shape[1]) == qparams(by_shape[2])
    results = [run(module, inputs) for module in by_shape]
    for one, other, third in zip(*results, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, third)


@pytest.mark.parametrize("kwargs", slow_but(1, {}, BOTH_DIRECTIONS))
def test_the_same_with_a_quantizer_that_looks_around(kwargs: dict[str, Any]) -> None:
    """torchao's quantizer for x86 annotates patterns: its annotation of a node depends on the nodes around
    it. It quantizes inputs only, so the results stay float, which the opaque shape warns about."""
    model, inputs = float_model(kwargs), batch(7, kwargs)
    results = []
    for shape in SHAPES:
        prepared = calibrated.itself(shape, "of inputs", **kwargs)
        if shape == "opaque":
            with pytest.warns(QuantizationWarning, match="stays float at output, h_n, c_n"):
                module = convert_decomposed_lstm(prepared)
        else:
            module = convert_decomposed_lstm(prepared)
        results.append(run(module, inputs))
    for value, one, other, third in zip(run(model, inputs), *results, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, third)
        assert 30 < sqnr(value, one) < 55


@pytest.mark.parametrize("kwargs", slow_but(1, {}, {"num_layers": 2}))
def test_one_tensor_as_both_states(kwargs: dict[str, Any]) -> None:
    """Hidden and cell state keep their own qparams, also at the boundary."""

    class Tied(Model):
        def forward(self, x: Tensor, state: Tensor) -> Any:
            return self.lstm(x, (state, state))

    torch.manual_seed(0)
    model = Tied(**kwargs).eval()
    inputs = [(x, h) for x, (h, _) in (batch(seed, kwargs) for seed in range(4))]
    results = []
    for shape in SHAPES:
        prepared = prepare_decomposed_lstm(
            decompose_lstm(torch.export.export(model, inputs[0]), shape), OfLinears()
        )
        with torch.no_grad():
            for each in inputs:
                prepared(*each)
            results.append(leaves(convert_decomposed_lstm(prepared)(*inputs[0])))
    for value, one, other, third in zip(leaves(model(*inputs[0])), *results, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, third)
        assert 25 < sqnr(value, one) < 45


def test_as_many_observers_as_one_cell_has() -> None:
    """Observers are compared by identity: the unrolled graph has those of the opaque graph, at any length."""
    kwargs = {"bidirectional": True}
    counts = {}
    for shape in SHAPES:
        prepared = calibrated.itself(shape, **kwargs)
        counts[shape] = len({id(m) for graph in graph_modules(prepared) for _, m in observer_nodes(graph)})
    assert len(set(counts.values())) == 1, counts


def test_the_size_of_rolled_and_opaque_does_not_depend_on_the_length() -> None:
    for shape in ("rolled", "opaque"):
        sizes = set()
        for steps in (2, 25):
            program = torch.export.export(float_model({}), batch(0, {}, steps))
            sizes.add(len(targets(decompose_lstm(program, shape))))
        assert len(sizes) == 1


@pytest.mark.parametrize("shape", SHAPES)
def test_weights_are_folded_to_integers(shape: str) -> None:
    module = converted.itself(shape)
    stored = [b for b in module.buffers() if b.dtype is torch.int8]
    assert sorted(tuple(b.shape) for b in stored) == [(4, HIDDEN), (4 * HIDDEN, INPUT), (4 * HIDDEN, HIDDEN)]
    assert len([b for b in module.buffers() if b.dtype is torch.int32 and b.dim() == 1]) == 3
    assert not [p for p in module.parameters() if p.dim() == 2]


@pytest.mark.parametrize("shape", ["rolled", "opaque"])
@pytest.mark.parametrize("prepared", [False, True])
def test_any_length_and_batch(shape: str, prepared: bool) -> None:
    """The program was exported with 4 steps and a batch of 8, which export had fixed."""
    kwargs = VARIANTS[5]
    model = float_model(kwargs)
    if prepared:
        decomposed = converted.itself(shape, **kwargs)
    else:
        _, decomposed = decomposed_from.itself(shape, **kwargs)
    for steps, size in ((1, 3), (7, 1), (13, 6)):
        inputs = batch(steps, kwargs, steps, size)
        for value, result in zip(run(model, inputs), run(decomposed, inputs), strict=True):
            assert value.shape == result.shape
            if prepared:
                assert 24 < sqnr(value, result) < 45
            else:
                torch.testing.assert_close(result, value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", ONE_FAST_SHAPE)
def test_a_batch_that_was_exported_dynamic_stays_so(shape: str) -> None:
    """The state is omitted: its zeros follow the batch."""

    class Stateless(Model):
        def forward(self, x: Tensor) -> Any:
            return self.lstm(x)

    torch.manual_seed(0)
    model = Stateless(num_layers=2).eval()
    x = torch.randn(STEPS, BATCH, INPUT)
    program = torch.export.export(model, (x,), dynamic_shapes=({1: torch.export.Dim.DYNAMIC},))
    prepared = prepare_decomposed_lstm(decompose_lstm(program, shape), OfLinears())
    with torch.no_grad():
        for seed in range(4):
            prepared(batch(seed, {})[0])
        module = convert_decomposed_lstm(prepared)
        for size in (1, 7):
            other = torch.randn(STEPS, size, INPUT)
            torch.testing.assert_close(leaves(prepared(other)), leaves(model(other)), rtol=0, atol=1e-6)
            for value, result in zip(leaves(model(other)), leaves(module(other)), strict=True):
                assert 24 < sqnr(value, result) < 45


def test_unrolled_refuses_another_length() -> None:
    for module in (decomposed_from.itself("unrolled")[1], converted.itself("unrolled")):
        with pytest.raises(RuntimeError, match="was unrolled for sequences of 4 steps"):
            module(*batch(0, {}, STEPS + 2))
        with pytest.raises(RuntimeError, match="was unrolled for sequences of 4 steps"):
            module(*batch(0, {}, STEPS - 2))


@pytest.mark.parametrize("kwargs", slow_but(1, {}, {"num_layers": 2, "bidirectional": True}))
def test_rolled_exported_again_with_dynamic_length_and_saved(kwargs: dict[str, Any]) -> None:
    module = converted.itself("rolled", **kwargs)
    scans = [node for node in module.graph.nodes if node.target is SCAN]
    assert len(scans) == (4 if kwargs else 1)
    for scan in scans:
        dtypes = [getattr(module, str(node.target)).dtype for node in scan.args[3]]
        assert sorted(map(str, dtypes)) == ["torch.int32", "torch.int32", "torch.int8", "torch.int8"]
    free = torch.export.Dim.DYNAMIC
    program = torch.export.export(
        module, batch(0, kwargs), dynamic_shapes=({0: free, 1: free}, ({1: free}, {1: free}))
    )
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    inputs = batch(3, kwargs, 9, 2)
    for one, other in zip(run(module, inputs), run(loaded, inputs), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("shape", ["rolled", "unrolled"])
def test_torchao_alone_does_for_the_rolled_shape_only(shape: str) -> None:
    """prepare_pt2e and convert_pt2e see the body of a scan; unrolled, every step has its own observers."""
    model, inputs = float_model({}), batch(7, {})
    prepared = with_ranges(prepare_pt2e(decomposed_from(shape)[1], OfLinears()), {})
    with torch.no_grad():
        module = convert_pt2e(prepared)
    same = qparams(module) == qparams(converted.itself(shape))
    assert same == (shape == "rolled")
    assert 25 < sqnr(run(model, inputs)[0], run(module, inputs)[0]) < 45


# -- the opaque boundary


def call_of(module: GraphModule) -> Node:
    (call,) = [n for n in module.graph.nodes if n.op == "call_module"]
    return call


@pytest.mark.parametrize("kwargs", [{}, {"num_layers": 2, "bidirectional": True}], ids=str)
def test_the_boundary_is_quantized_with_the_cells_qparams(kwargs: dict[str, Any]) -> None:
    module = converted.itself("opaque", **kwargs)
    call = call_of(module)
    per_channel = OPS.dequantize_per_channel.default
    of_rows = per_channel if kwargs else DEQUANTIZE
    assert [argument.target for argument in call.args] == [DEQUANTIZE, of_rows, of_rows]
    for getitem in call.users:
        (quantize,) = getitem.users
        (dequantize,) = quantize.users
        assert dequantize.target is of_rows
    cell = module.get_submodule(f"{call.target}.layers.0.layer_fw.cell")
    x = next(n for n in cell.graph.nodes if n.op == "placeholder")
    (quantize_x,) = x.users
    assert call.args[0].args[1:6] == quantize_x.args[1:6]


def test_the_boundary_changes_no_value() -> None:
    kwargs = {"num_layers": 2, "bidirectional": True}
    module, inputs = converted.itself("opaque", **kwargs), batch(7, kwargs)
    inner = module.get_submodule(str(call_of(module).target))
    with torch.no_grad():
        results = inner(inputs[0], *inputs[1])
    for one, other in zip(results, run(module, inputs)[1:], strict=True):
        assert torch.equal(one, other)


def test_a_consumer_with_the_same_qparams_does_not_quantize_again() -> None:
    module = converted.itself("opaque")
    (linear,) = [n for n in module.graph.nodes if n.target is ATEN.linear.default]
    q_of_output = linear.args[0].args[0]
    assert q_of_output.args[0].args[0] is call_of(module)


def test_edges_a_quantizer_leaves_float_are_named() -> None:
    class LinearsOnly(OfLinears):
        def annotate(self, model: GraphModule) -> GraphModule:
            super().annotate(model)
            for node in model.graph.nodes:
                if node.target is not ATEN.linear.default:
                    node.meta.pop("quantization_annotation", None)
            return model

    _, decomposed = decomposed_from.itself("opaque")
    prepared = with_ranges(prepare_decomposed_lstm(decomposed, LinearsOnly()), {})
    with pytest.warns(QuantizationWarning, match=r"'lstm_decomposed' stays float at c0, output, h_n, c_n"):
        module = convert_decomposed_lstm(prepared)
    assert [argument.target for argument in call_of(module).args][:2] == [DEQUANTIZE, DEQUANTIZE]


# -- refusals


def test_bad_programs_are_refused() -> None:
    linear = torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),))
    with pytest.raises(AnnotationError, match=r"no aten.lstm.input"):
        decompose_lstm(linear)
    with pytest.raises(AnnotationError, match="got LSTM"):
        decompose_lstm(nn.LSTM(2, 2))
    for shape in ("flat", "opaque text"):
        with pytest.raises(AnnotationError, match="the shapes are: rolled, unrolled, opaque\\."):
            decompose_lstm(exported(), shape)


def test_double_precision_is_refused() -> None:
    model = float_model({}).double()
    x, (h, c) = batch(0, {})
    program = torch.export.export(model, (x.double(), (h.double(), c.double())))
    with pytest.raises(AnnotationError, match=r"lstm_weight_ih_l0.* is torch.float64"):
        decompose_lstm(program)


def test_computed_weights_are_refused() -> None:
    model = float_model({})
    nn.utils.parametrizations.weight_norm(model.lstm, "weight_ih_l0")
    program = torch.export.export(model, batch(0, {}))
    with pytest.raises(AnnotationError, match="is computed in the graph"):
        decompose_lstm(program)


def test_cells_prepared_by_torchao_alone_are_refused() -> None:
    _, decomposed = decomposed_from("opaque")
    with pytest.raises(AnnotationError, match="has no observers"):
        convert_decomposed_lstm(prepare_pt2e(decomposed, OfLinears()))
