"""Tables with float zero points under torch.export.export alone: plain operators, the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import (
    QConfigMapping,
    float_qparams_weight_only_qconfig,
    float_qparams_weight_only_qconfig_4bit,
)
from torch.export import ExportedProgram
from torch.fx import GraphModule

from tests.helpers.executorch_models import PER_CHANNEL, Words, converted
from torchq_compat.read.qdq import DEQUANTIZE_PER_CHANNEL


class Tied(nn.Module):
    """A model with one table, used for look-ups and as a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(100, 8)
        self.other = nn.Embedding(100, 8, padding_idx=0)

    def forward(self, words: Tensor) -> Tensor:
        found = self.table(words) + self.other(words)
        return nn.functional.linear(found, self.table.weight)


class Around(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.model(words)
        return scores


def words(*size: int) -> Tensor:
    return torch.randint(0, 100, size or (6, 4))


def mapping(qconfig: Any) -> QConfigMapping:
    return QConfigMapping().set_global(PER_CHANNEL.global_qconfig).set_object_type(nn.Embedding, qconfig)


def with_float_zero_points(program: ExportedProgram) -> list[str]:
    nodes = program.graph.find_nodes(op="call_function", target=DEQUANTIZE_PER_CHANNEL)
    return [node.name for node in nodes if node.args[2].meta["val"].is_floating_point()]


@pytest.mark.parametrize(
    ("model", "around", "strict"),
    [
        (Tied, Around, False),
        *(
            pytest.param(model, around, strict, marks=pytest.mark.slow)
            for model, around in ((Words, nn.Identity), (Words, Around), (Tied, nn.Identity))
            for strict in (False, True)
        ),
        pytest.param(Tied, Around, True, marks=pytest.mark.slow),
    ],
)
def test_no_runtime_meets_float_zero_points(
    model: Callable[[], nn.Module], around: Callable[[nn.Module], nn.Module], strict: bool
) -> None:
    lowered = converted(model(), mapping(float_qparams_weight_only_qconfig), words)
    reference: GraphModule = lowered.reference  # type: ignore[assignment]
    names = {"words": {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}}
    for quantized in (reference, lowered):
        whole = quantized if around is nn.Identity else around(quantized)
        sizes = tuple(names.values())
        program = torch.export.export(whole, (words(),), dynamic_shapes=sizes, strict=strict)
        assert with_float_zero_points(program) == []
        for x in (words(), words(3, 9)):
            assert torch.equal(program.module()(x), reference(x))
    tables = reference.graph.find_nodes(op="call_function", target=DEQUANTIZE_PER_CHANNEL)
    assert any("table" in str(node.args[0]) for node in tables), "the model's own graph changed"


def test_tables_of_four_bits_and_a_loaded_state() -> None:
    torch.manual_seed(1)
    first, second = (
        converted(Words(), mapping(float_qparams_weight_only_qconfig_4bit), words).reference for _ in range(2)
    )
    x = words(5, 3)
    assert not torch.equal(first(x), second(x))
    first.load_state_dict(second.state_dict())
    program = torch.export.export(first, (x,))
    assert with_float_zero_points(program) == []
    assert torch.equal(program.module()(x), second(x))


def test_integers_as_zero_points_stay_per_channel() -> None:
    """Backends search for that operator behind the weight of a linear."""
    model = converted(Words(), mapping(float_qparams_weight_only_qconfig), words)
    program = torch.export.export(model, (words(),))
    (weight,) = program.graph.find_nodes(op="call_function", target=DEQUANTIZE_PER_CHANNEL)
    assert weight.args[2].meta["val"].dtype == torch.int64
