"""Converted cells in two parts, the projection of all inputs at once and the step: the same numbers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.helpers.converted_cells import KINDS, cells_of, converted
from tests.helpers.lstm_flow import uniform
from tests.helpers.oracle import leaves
from torchq_compat.modules.parts import converted_qparams, part_nodes
from torchq_compat.recurrent.cell_graph import call_on

LINEAR = torch.ops.aten.linear.default


def cell_inputs(cell: GraphModule) -> tuple[Tensor, ...]:
    """Return x with seven steps (7, 3, I) and states (3, width)."""
    widths = [int(n.meta["val"].shape[1]) for n in cell.graph.nodes if n.op == "placeholder"]
    return uniform(1.0, 7, 3, widths[0]), *(uniform(0.5, 3, width) for width in widths[1:])


def assert_same_integers(cell: GraphModule, found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """Assert at most one step of difference, and rarely: more rows may change a linear's summation order."""
    for qparams, mine, theirs in zip(converted_qparams(cell), found, expected, strict=True):
        assert qparams is not None
        steps = (qparams.quantize(mine).int() - qparams.quantize(theirs).int()).abs()
        assert int(steps.max()) <= 1
        assert float((steps > 0).float().mean()) < 0.01


@pytest.mark.parametrize("name", KINDS)
def test_projection_and_step_are_the_cell(name: str) -> None:
    for cell in cells_of(converted.itself(name)):
        x, *states = cell_inputs(cell)
        projected = cell.project(x)
        assert all(each.shape[:2] == (7, 3) for each in projected)
        step, repeated = call_on(cell, cell.step_graph()), cell.repeated_step()
        for time, x_t in enumerate(x):
            at_time = [each[time] for each in projected]
            new = step(cell, *at_time, *states)
            assert_same_integers(cell, new, cell(x_t, *states))
            assert all(map(torch.equal, new, repeated(*at_time, *states)))
            states = list(new)


def linears(graph: Graph) -> int:
    return sum(node.target is LINEAR for node in graph.nodes)


@pytest.mark.parametrize("name", KINDS)
def test_nothing_of_the_input_is_left_to_the_step(name: str) -> None:
    for cell in cells_of(converted.itself(name)):
        of_input = [node for part, node in part_nodes(cell) if part.startswith("igates")]
        assert linears(cell.projection_graph()) == len(of_input) in (1, 3, 4)
        assert linears(cell.step_graph()) == linears(cell.graph) - len(of_input) > 0
        assert not any(node.name.startswith("igates") for node in cell.step_graph().nodes if node.users)
        # Nodes missing from one graph are in the other; weights that both read are in both.
        both = {n.name for graph in (cell.projection_graph(), cell.step_graph()) for n in graph.nodes}
        assert {node.name for node in cell.graph.nodes} <= both


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_new_qparams_reach_both_halves(name: str) -> None:
    module, other = converted.itself(name), converted(name, seed=1, gain=3.0)
    x = uniform(1.0, 7, 3, 8)
    with torch.no_grad():
        expected = leaves(module(x))
        assert not torch.equal(leaves(other(x))[0], expected[0])
        other.load_state_dict(module.state_dict())
        assert all(map(torch.equal, leaves(other(x)), expected))


def test_a_copy_has_halves_of_its_own() -> None:
    module = converted.itself("lstm")
    x = uniform(1.0, 7, 3, 8)
    with torch.no_grad():
        expected = leaves(module(x))
        twin = copy.deepcopy(module)
        for value in twin.state_dict().values():
            value.zero_()
        assert all(map(torch.equal, leaves(module(x)), expected))
        assert not torch.equal(leaves(twin(x))[0], expected[0])


def test_nothing_is_registered_twice() -> None:
    for cell in cells_of(converted("lstm")):
        assert sorted(cell.state_dict()) == [
            "_extra_state",
            "_frozen_param0",
            "_frozen_param1",
            "hgates.bias",
            "igates.bias",
        ]
        cell.to(torch.float64)
        assert {each.dtype for each in cell.repeated_step().args if isinstance(each, Tensor)} == {
            torch.float32,  # the weights: dequantize gives float32
            torch.float64,  # the bias
        }


def test_a_cell_with_hooks_is_called_itself() -> None:
    module = converted("lstm")
    x, widths = uniform(1.0, 7, 3, 8), []
    with torch.no_grad():
        expected = leaves(module(x))
        for cell in cells_of(module):
            cell.register_forward_pre_hook(lambda _, args: widths.append(args[0].shape))
        for qparams, mine, theirs in zip(
            module.opaque_output_qparams(expected), leaves(module(x)), expected, strict=True
        ):
            assert qparams is not None
            assert int((qparams.quantize(mine).int() - qparams.quantize(theirs).int()).abs().max()) <= 1
    assert widths == [(3, 8)] * 14 + [(3, 24)] * 14


@pytest.mark.parametrize("name", ["lstm", "gru", "split lstm"])
def test_packed_sequences(name: str) -> None:
    module, lengths = converted.itself(name), [7, 4, 1]
    padded = uniform(1.0, 7, 3, 8)
    with torch.no_grad():
        packed, _ = module(pack_padded_sequence(padded, lengths))
        found, _ = pad_packed_sequence(packed)
        for row, length in enumerate(lengths):
            alone, _ = module(padded[:length, row : row + 1])
            (qparams, *_) = module.opaque_output_qparams([alone])
            assert qparams is not None
            steps = qparams.quantize(found[:length, row : row + 1]).int() - qparams.quantize(alone).int()
            assert int(steps.abs().max()) <= 1
            assert float((steps != 0).float().mean()) < 0.02
