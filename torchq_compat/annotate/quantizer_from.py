"""A QConfigMapping and a BackendConfig as a torchao ``Quantizer``, for the user's own ``prepare_pt2e`` call.

    exported = torch.export.export(model, example_inputs).module()
    prepared = prepare_pt2e(exported, quantizer_from(get_default_qconfig_mapping("x86")))

The Quantizer applies FX's configuration of ops, but not of custom modules, which ``prepare_fx`` swaps before
capture. Ranges are torchao's: a reduced range saturates at its end, while FX saturates at the end of the
dtype's range.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch.fx import GraphModule, Node
from torchao.quantization.pt2e.quantizer import QuantizationSpec, SharedQuantizationSpec
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY, QuantizationSpecBase

from torchq_compat.annotate.annotation import NodeSpecs, SpecQuantizer
from torchq_compat.annotate.decide import decide_graph
from torchq_compat.capture.writes.out_of_place import make_out_of_place
from torchq_compat.config.backend_configs import read_backend_config
from torchq_compat.config.qconfig_mappings import read_qconfig_mapping
from torchq_compat.qspecs.quantization_specs import make_spec
from torchq_compat.qspecs.weight_observers import WeightConstructor
from torchq_compat.support.decisions import Action, Decision, Report
from torchq_compat.support.torch_ao import BackendConfig, QConfigMapping

__all__ = ["TranslatedQuantizer", "quantizer_from"]


class TranslatedQuantizer(SpecQuantizer):
    """Annotates the ops that a QConfigMapping and a BackendConfig quantize; see ``quantizer_from``.

    Nodes that an earlier quantizer in a ``ComposableQuantizer`` has annotated stay as they are.

    Attributes:
        report: the decisions about the last annotated graph, printable and machine-readable.
    """

    def __init__(self, qconfig_mapping: Any, backend_config: Any = None) -> None:
        super().__init__(self._decide)
        self._rules = read_qconfig_mapping(qconfig_mapping)
        self._backend = read_backend_config(backend_config)
        self.report = Report(())

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        make_out_of_place(model)
        return model

    def _decide(self, model: GraphModule) -> Mapping[Node, NodeSpecs]:
        decided = decide_graph(model, None, self._rules, self._backend, boundaries={})
        taken = {node for node in model.graph.nodes if _is_annotated(node)}
        names = {node.name for node in taken}
        self.report = Report(
            tuple(_left_alone(each) if each.node in names else each for each in decided.decisions)
        )
        specs = {node: _for_any_convert(each) for node, each in decided.specs.items()}
        return {
            node: _beside(node, each, specs, taken) if taken and each else each
            for node, each in specs.items()
            if node not in taken
        }


def quantizer_from(
    qconfig_mapping: QConfigMapping | dict[str, Any],
    backend_config: BackendConfig | dict[str, Any] | None = None,
) -> TranslatedQuantizer:
    """Return a torchao Quantizer that annotates what FX would have quantized.

    In a ``ComposableQuantizer`` it annotates what the quantizers before it did not annotate.

    Modules are identified by their path and class name in the exported graph; a class defined inside a
    function cannot be found by its name, so a rule by such an object type does not apply.

    Args:
        qconfig_mapping: a QConfigMapping or its dict form.
        backend_config: a BackendConfig or its dict form; default: torch.ao's native backend.

    Raises:
        ConfigError: a setting cannot be read; or, while annotating, QConfigs conflict in a fused pattern.

    Returns:
        The Quantizer; its ``report`` holds the decisions about the last annotated graph.

    Example:
        >>> import torch
        >>> from torch.ao.quantization import get_default_qconfig_mapping
        >>> from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
        >>> from torchq_compat import quantizer_from
        >>> model, x = torch.nn.Sequential(torch.nn.Linear(4, 2)).eval(), torch.randn(3, 4)
        >>> exported = torch.export.export(model, (x,)).module()
        >>> prepared = prepare_pt2e(exported, quantizer_from(get_default_qconfig_mapping("x86")))
        >>> _ = prepared(x)  # calibrate
        >>> convert_pt2e(prepared)(x).shape
        torch.Size([3, 2])
    """
    return TranslatedQuantizer(qconfig_mapping, backend_config)


def _is_annotated(node: Node) -> bool:
    annotation = node.meta.get(Q_ANNOTATION_KEY)
    return annotation is not None and annotation._annotated


def _left_alone(decision: Decision) -> Decision:
    reason = "annotated by a quantizer before this one"
    return replace(decision, action=Action.QUANTIZED, reason=reason, warn=False)


def _beside(node: Node, specs: NodeSpecs, decided: Mapping[Node, NodeSpecs], taken: set[Node]) -> NodeSpecs:
    """Return the ``specs`` of ``node`` when those of the nodes in ``taken`` are not written.

    ``node`` observes itself what it would have shared with, or read from, observers of these nodes.
    """

    def present(spec: QuantizationSpecBase) -> QuantizationSpecBase:
        while isinstance(spec, SharedQuantizationSpec):
            point = spec.edge_or_node
            annotated = point[1] if isinstance(point, tuple) else point
            if annotated not in taken or _spec_of(point) is not None:
                return spec
            own = decided[annotated]
            meant = own.inputs[point[0]] if isinstance(point, tuple) else own.output
            assert meant is not None
            spec = meant
        return spec

    inputs = {producer: present(spec) for producer, spec in specs.inputs.items()}
    for producer in node.all_input_nodes:
        meant = decided[producer].output if producer in taken and producer in decided else None
        if meant is not None and producer not in inputs and _spec_of(producer) is None:
            inputs[producer] = present(meant)
    shared = getattr(specs.output, "edge_or_node", None)
    if shared in taken and shared in inputs:
        # An op that moves data: its output shares the observer of its input.
        return NodeSpecs(inputs, SharedQuantizationSpec((shared, node)))
    return NodeSpecs(inputs, None if specs.output is None else present(specs.output))


def _spec_of(point: Any) -> QuantizationSpecBase | None:
    """Return the annotated spec at ``point``."""
    node = point[1] if isinstance(point, tuple) else point
    annotation = node.meta[Q_ANNOTATION_KEY]
    spec: QuantizationSpecBase | None = (
        annotation.input_qspec_map.get(point[0]) if isinstance(point, tuple) else annotation.output_qspec
    )
    return spec


def _for_any_convert(specs: NodeSpecs) -> NodeSpecs:
    inputs = {producer: _with_ready_observer(spec) for producer, spec in specs.inputs.items()}
    return replace(specs, inputs=inputs)


def _with_ready_observer(spec: QuantizationSpecBase) -> QuantizationSpecBase:
    constructor = spec.observer_or_fake_quant_ctr if isinstance(spec, QuantizationSpec) else None
    return make_spec(constructor.for_any_convert) if isinstance(constructor, WeightConstructor) else spec
