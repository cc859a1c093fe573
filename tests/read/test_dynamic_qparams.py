"""Dynamic quantization: qparams chosen from each tensor, with FX's numbers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import (
    PlaceholderObserver,
    QConfig,
    QConfigMapping,
    default_dynamic_qconfig,
    default_weight_observer,
    get_default_qconfig_mapping,
)
from torch.ao.quantization.backend_config import BackendConfig, BackendPatternConfig, DTypeConfig

import torchq_compat as tc
from tests.helpers.oracle import by_us, quantize_nodes
from torchq_compat.errors import QuantizationWarning
from torchq_compat.read.observers import DynamicQuantization
from torchq_compat.support.quantized_tensors import using_engine


@pytest.fixture(params=["x86", "qnnpack"])
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    with using_engine(request.param):
        yield request.param


def quantizer_graph(dtype: torch.dtype) -> torch.fx.GraphModule:
    root = nn.Module()
    root.observer = DynamicQuantization(dtype)
    graph = torch.fx.Graph()
    observer = graph.call_module("observer", (graph.placeholder("x"),))
    graph.output(observer)
    graph_module = torch.fx.GraphModule(root, graph)
    root.observer.convert(graph_module, observer)
    graph_module.recompile()
    return graph_module


@pytest.mark.parametrize(
    ("dtype", "legacy"), [(torch.uint8, torch.quint8), (torch.int8, torch.qint8)], ids=["uint8", "int8"]
)
def test_numbers_are_those_of_the_operator_in_fx_reference_graphs(
    dtype: torch.dtype, legacy: torch.dtype, engine: str
) -> None:
    """Scales that differ in the last bit move few values by a step, and none by more."""
    generator = torch.Generator().manual_seed(0)
    quantize = quantizer_graph(dtype)
    moved = values = 0
    for center in (0.0, 3.0, -3.0, 100.0):
        for width in (1e-3, 1.0, 50.0):
            x = torch.randn(4096, generator=generator) * width + center
            reduced = engine == "x86"
            theirs = torch.quantize_per_tensor_dynamic(x, legacy, reduced)
            difference = (quantize(x) - theirs.dequantize()).abs()
            assert float(difference.max()) <= 1.001 * theirs.q_scale()
            moved += int((difference > 0.01 * theirs.q_scale()).sum())
            values += x.numel()
    assert moved / values < 1e-3


def test_tiny_and_constant_tensors_have_a_finite_scale() -> None:
    quantize = quantizer_graph(torch.uint8)
    for x in (torch.zeros(8), torch.full((8,), 2.5), torch.full((8,), -1e-12)):
        assert bool(quantize(x).isfinite().all())
        torch.testing.assert_close(quantize(x), x, rtol=0.01, atol=1e-4)


def test_each_call_has_its_own_range() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8)).eval()
    mapping = QConfigMapping().set_global(default_dynamic_qconfig)
    prepared, converted = by_us(model, mapping, [(torch.randn(4, 16),)])
    assert quantize_nodes(converted)
    for factor in (1e-2, 1.0, 1e2):
        x = torch.randn(5, 16) * factor
        error = (converted(x) - model(x)).abs().max() / model(x).abs().max()
        assert 1e-4 < float(error) < 0.05
    assert tc.explain(prepared).find("0")[0].action == "quantized"


def test_dynamic_in_a_dtype_the_platform_cannot_choose_qparams_for_stays_float() -> None:
    wide = QConfig(
        PlaceholderObserver.with_args(dtype=torch.qint32, is_dynamic=True), default_weight_observer
    )
    mapping = QConfigMapping().set_global(wide)
    with pytest.warns(QuantizationWarning, match=r"Linear at '0' stays float.*TQ401"):
        prepared, _ = by_us(nn.Sequential(nn.Linear(4, 4)).eval(), mapping, [(torch.randn(2, 4),)])
    (decision,) = tc.explain(prepared).find("0")
    assert decision.action == "float"
    assert "activation int32" in decision.reason


class ComputedWeight(nn.Module):
    """A module whose weight is no parameter but computed in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * 0.5)


def test_computed_weight_of_a_function_is_quantized() -> None:
    torch.manual_seed(0)
    model, x = ComputedWeight().eval(), torch.randn(6, 8)
    prepared, converted = by_us(model, get_default_qconfig_mapping("qnnpack"), [(x,)])
    actions = {d.kind: d.action for d in tc.explain(prepared)}
    assert actions["linear.default"] == "quantized"
    assert 0 < float((converted(x) - model(x)).abs().max()) < 0.1


def test_weight_of_a_users_own_function_pattern() -> None:
    """input_type_to_index says which argument of a function is its weight."""

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(8, 4))

        def forward(self, x: Tensor) -> Tensor:
            return torch.matmul(x, self.table)

    config = DTypeConfig(torch.quint8, torch.quint8, torch.qint8, torch.float32)
    pattern = BackendPatternConfig(torch.matmul).add_dtype_config(config)
    backend = BackendConfig("mine").set_backend_pattern_config(
        pattern._set_input_type_to_index({"weight": 1})
    )
    x = torch.randn(6, 8)
    _, converted = by_us(
        Product().eval(), get_default_qconfig_mapping("qnnpack"), [(x,)], backend_config=backend
    )
    dtypes = [value.dtype for value in converted.state_dict().values()]
    assert torch.int8 in dtypes
