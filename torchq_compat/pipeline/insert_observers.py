"""Inserts observers into a captured model, where FX's configuration or a user's Quantizer puts them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from torch import nn
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e.quantizer import Quantizer

from torchq_compat.annotate.annotation import NodeSpecs
from torchq_compat.annotate.call_boundary import OpaqueBoundary
from torchq_compat.annotate.decide import decide_graph
from torchq_compat.annotate.op_records import write_op_records
from torchq_compat.annotate.user_quantizer import UserQuantizer
from torchq_compat.config.backend_configs import BackendTable
from torchq_compat.config.qconfig_mappings import QConfigRules
from torchq_compat.graph.observed_graph import prepare_graph, prepare_with
from torchq_compat.graph.quantized_interface import QuantizedInterface
from torchq_compat.support.decisions import Decision

__all__ = ["Captured", "observe_by_quantizer", "observe_by_rules"]

Observed = tuple[GraphModule, tuple[Decision, ...]]


@dataclass(frozen=True)
class Captured:
    """A captured model.

    Attributes:
        graph_module: the captured graph, with custom modules as opaque calls.
        model: the exported module.
        boundaries: the specs around each opaque call.
        interface: which inputs and outputs are integers.
        cumulative: what ``batch_norm.before_capture`` returned.
        batch_norms: path of every batch norm -> label of the op it follows.
    """

    graph_module: GraphModule
    model: nn.Module
    boundaries: Mapping[Node, OpaqueBoundary]
    interface: QuantizedInterface
    cumulative: Collection[str] = ()
    batch_norms: Mapping[str, str] = field(default_factory=dict)


def observe_by_rules(
    captured: Captured, rules: QConfigRules, backend: BackendTable, *, is_qat: bool
) -> Observed:
    """Annotate and prepare the graph by a QConfigMapping and a BackendConfig; return the decisions too."""
    decisions: list[Decision] = []

    def decide(graph_module: GraphModule) -> dict[Node, NodeSpecs]:
        decided = decide_graph(
            graph_module,
            captured.model,
            rules,
            backend,
            captured.boundaries,
            captured.interface.input_nodes(graph_module),
            captured.interface.output_edges(graph_module),
            frozenset(captured.batch_norms.values()),
        )
        decisions.extend(decided.decisions)
        write_op_records(decided.records)
        return decided.specs

    prepared = prepare_graph(captured.graph_module, decide, is_qat=is_qat, cumulative=captured.cumulative)
    return prepared, tuple(decisions)


def observe_by_quantizer(captured: Captured, quantizer: Quantizer, *, is_qat: bool) -> Observed:
    """Annotate everything but custom modules by ``quantizer``, and prepare; return the decisions too."""
    around = UserQuantizer(quantizer, captured.boundaries, captured.model)
    prepared = prepare_with(captured.graph_module, around, is_qat=is_qat, cumulative=captured.cumulative)
    return prepared, around.decisions(prepared)
