"""QConfigMapping and BackendConfig as a torchao ``Quantizer``, for a ``prepare_pt2e`` call of one's own.

    exported = torch.export.export(model, example_inputs).module()
    prepared = prepare_pt2e(exported, quantizer_from(get_default_qconfig_mapping("x86")))

What FX's configuration says of ops is carried over. Custom modules are not: they are swapped before capture,
by ``prepare_fx``. Ranges are torchao's: a reduced range saturates at its end, where FX goes on to that of the
dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch.ao.quantization import QConfigMapping
from torch.ao.quantization.backend_config import BackendConfig
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e.quantizer import QuantizationSpec
from torchao.quantization.pt2e.quantizer.quantizer import QuantizationSpecBase

from torchq_compat.annotate.annotation import NodeSpecs, SpecQuantizer
from torchq_compat.annotate.decide import decide_graph
from torchq_compat.capture.inplace import make_out_of_place
from torchq_compat.config.backend_configs import read_backend_config
from torchq_compat.config.qconfig_mappings import read_qconfig_mapping
from torchq_compat.qspecs.quantization_specs import make_spec
from torchq_compat.qspecs.weight_observers import WeightConstructor
from torchq_compat.support.decisions import Report

__all__ = ["TranslatedQuantizer", "quantizer_from"]


class TranslatedQuantizer(SpecQuantizer):
    """Annotates what a QConfigMapping and a BackendConfig quantize; see ``quantizer_from``.

    Attributes:
        report: the decisions about the graph annotated last, printable and machine-readable.
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
        self.report = Report(decided.decisions)
        return {node: _for_any_convert(specs) for node, specs in decided.specs.items()}


def quantizer_from(
    qconfig_mapping: QConfigMapping | dict[str, Any],
    backend_config: BackendConfig | dict[str, Any] | None = None,
) -> TranslatedQuantizer:
    """Return a torchao Quantizer that annotates what FX would have quantized.

    Modules are known by what the exported graph holds of them, path and class name; a class defined inside a
    function cannot be found by its name, so a rule by such an object type does not apply.

    Args:
        qconfig_mapping: a QConfigMapping or its dict form.
        backend_config: a BackendConfig or its dict form; default: torch.ao's native backend.

    Raises:
        ConfigError: a setting that cannot be read; while annotating, QConfigs that conflict in a fused
            pattern.

    Returns:
        The Quantizer; its ``report`` holds the decisions about the graph it annotated last.

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


def _for_any_convert(specs: NodeSpecs) -> NodeSpecs:
    inputs = {producer: _with_ready_observer(spec) for producer, spec in specs.inputs.items()}
    return replace(specs, inputs=inputs)


def _with_ready_observer(spec: QuantizationSpecBase) -> QuantizationSpecBase:
    constructor = spec.observer_or_fake_quant_ctr if isinstance(spec, QuantizationSpec) else None
    return make_spec(constructor.for_any_convert) if isinstance(constructor, WeightConstructor) else spec
