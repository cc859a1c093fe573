"""MultiheadAttention, observed and converted.

Legacy: ``torch.ao.nn.quantizable.MultiheadAttention`` and ``torch.ao.nn.quantized.MultiheadAttention``, which
FX maps and then crashes on, whatever the call style. The classes here derive from them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from torchq_compat.capture.torch_export import capture_flat
from torchq_compat.custom_modules.attention.projections import (
    OUT_PARTS,
    PROJECTION_PARTS,
    WEIGHTS_PARTS,
    ProjectIn,
    ProjectOut,
    ReturnedWeights,
)
from torchq_compat.custom_modules.attention.structure import AttentionCall, AttentionStructure
from torchq_compat.custom_modules.parts.own_linear import own_parameter
from torchq_compat.custom_modules.parts.part_graph import (
    ConvertedPartGraphModule,
    PartGraphModule,
    convert_parts,
    converted_qparams,
    prepare_parts,
)
from torchq_compat.custom_modules.parts.part_owner import PartOwner
from torchq_compat.custom_modules.parts.part_specs import PartSpecs
from torchq_compat.errors import CustomModuleError
from torchq_compat.qspecs.qparams import QParams
from torchq_compat.qspecs.quantization_specs import OpSpecs
from torchq_compat.support.argument_checks import checked_arguments, instance_of
from torchq_compat.support.dtypes import as_dtype
from torchq_compat.support.torch_ao import quantizable, quantized

__all__ = ["AttentionModule", "ConvertedMultiheadAttention", "ObservedMultiheadAttention"]


class AttentionModule(PartOwner):
    """The base class of the observed and the converted module.

    Args:
        structure: the constructor arguments of the float module.
        bias_k: (1, 1, E), appended to the keys in floats, or None.
        bias_v: (1, 1, E), appended to the values in floats, or None.
        project_in: the projections of query, key and value.
        project_out: the projection of the attended values.
        returned_weights: observes the attention weights that a call returns.
    """

    inputs_named_as = nn.MultiheadAttention

    def __init__(
        self,
        structure: AttentionStructure,
        bias_k: Tensor | None,
        bias_v: Tensor | None,
        project_in: GraphModule,
        project_out: GraphModule,
        returned_weights: GraphModule,
    ) -> None:
        super().__init__()
        self.structure = structure
        self.bias_k = bias_k
        self.bias_v = bias_v
        self.project_in = project_in
        self.project_out = project_out
        self.returned_weights = returned_weights

    embed_dim = property(lambda self: self.structure.embed_dim)
    num_heads = property(lambda self: self.structure.num_heads)
    dropout = property(lambda self: self.structure.dropout)
    batch_first = property(lambda self: self.structure.batch_first)
    kdim = property(lambda self: self.structure.kdim)
    vdim = property(lambda self: self.structure.vdim)
    add_zero_attn = property(lambda self: self.structure.add_zero_attn)
    head_dim = property(lambda self: self.structure.head_dim)

    def graphs(self) -> Iterator[tuple[str, GraphModule]]:
        yield "project_in", self.project_in
        yield "project_out", self.project_out
        yield "returned_weights", self.returned_weights

    def result_dtypes(self, count: int) -> tuple[torch.dtype | None, ...]:
        return (self.specs.group_dtype("output"), self.specs.group_dtype("attention_weights"))[:count]

    def opaque_call(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Run a call of ``torch.nn.MultiheadAttention``.

        Raises:
            CustomModuleError: if the float module would refuse the arguments.
        """
        call = AttentionCall.read(self.structure, self.module_path, args, kwargs)
        dtype = call.query.dtype
        q, k, v = self.project_in(*(as_dtype(x, torch.float32) for x in (call.query, call.key, call.value)))
        attended, weights = self._attend(q, k, v, call.mask)
        (output,) = self.project_out(attended)
        returned: Tensor | None = None
        if call.need_weights:
            wanted = weights.mean(1) if call.average else weights
            (flat,) = self.returned_weights(wanted.flatten())
            returned = as_dtype(flat.view_as(wanted), dtype)
        return call.results(self.structure, as_dtype(output, dtype), returned)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return attended values (L, N, E) and weights (N, H, L, S), computed in floats."""
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat([k, self.bias_k.expand(1, k.shape[1], -1)])
            v = torch.cat([v, self.bias_v.expand(1, v.shape[1], -1)])
        queries, keys, values = (self._heads(tensor) for tensor in (q, k, v))
        if self.structure.add_zero_attn:
            keys, values = (F.pad(tensor, (0, 0, 0, 1)) for tensor in (keys, values))
        scores = (queries * self.head_dim**-0.5) @ keys.transpose(-2, -1)
        if mask is not None:
            scores = scores + F.pad(mask.float(), (0, keys.shape[2] - mask.shape[-1]))
        weights = F.dropout(scores.softmax(-1), self.structure.dropout, self.training)
        attended = (weights @ values).permute(2, 0, 1, 3).flatten(2)
        return attended, weights

    def _heads(self, tensor: Tensor) -> Tensor:
        """Split the heads: (length, N, E) -> (N, H, length, E / H)."""
        length, batch, _ = tensor.shape
        return tensor.reshape(length, batch, self.num_heads, self.head_dim).permute(1, 2, 0, 3)


class ObservedMultiheadAttention(AttentionModule, quantizable.MultiheadAttention):
    """A MultiheadAttention whose projections are observed, or fake-quantized."""

    def _get_name(self) -> str:
        return "QuantizableMultiheadAttention"

    @classmethod
    def observe(cls, module: nn.MultiheadAttention, specs: PartSpecs) -> Self:
        """Return an observed module with copies of the parameters of the float ``module``."""
        activation = specs.op_specs.activation_dtype
        inputs = dict.fromkeys(("query", "key", "value"), activation)
        device = module.out_proj.weight.device
        attended = torch.zeros(3, 2, module.embed_dim, device=device)
        observed = cls(
            AttentionStructure.of(module),
            None if module.bias_k is None else own_parameter(module.bias_k),
            None if module.bias_v is None else own_parameter(module.bias_v),
            _prepare(ProjectIn(module), ProjectIn.example_inputs(module), PROJECTION_PARTS, specs, inputs),
            _prepare(ProjectOut(module), (attended,), OUT_PARTS, specs, {"attended": activation}),
            _prepare(ReturnedWeights(), (torch.zeros(4, device=device),), WEIGHTS_PARTS, specs, {}),
        )
        observed.specs = specs
        observed.qconfig = specs.op_specs.qconfig
        observed.train(module.training)
        return observed

    @classmethod
    @checked_arguments(other=instance_of(nn.MultiheadAttention))
    def from_float(cls, other: nn.MultiheadAttention) -> Any:
        """Observe the float module ``other`` by its qconfig. Legacy signature.

        Raises:
            CustomModuleError: if it has no qconfig.
        """
        qconfig = getattr(other, "qconfig", None)
        if qconfig is None:
            raise CustomModuleError(
                f"the float {type(other).__name__} has no qconfig.",
                hint="prepare_fx sets it before it calls from_float; on your own, set its qconfig first.",
            )
        return cls.observe(other, PartSpecs(OpSpecs(qconfig)))


class ConvertedMultiheadAttention(AttentionModule, quantized.MultiheadAttention):
    """A MultiheadAttention of q-dq projections with folded integer weights."""

    def _get_name(self) -> str:
        return "QuantizedMultiheadAttention"

    @classmethod
    def from_observed(cls, other: nn.Module) -> Self:
        """Convert copies of the graphs of ``other``.

        Raises:
            CustomModuleError: ``other`` was not observed by this package.
        """
        if not isinstance(other, ObservedMultiheadAttention):
            raise CustomModuleError.not_observed_here(type(other).__name__)
        graphs = [
            ConvertedPartGraphModule.wrap(convert_parts(copy.deepcopy(graph))) for _, graph in other.graphs()
        ]
        project_in, project_out, returned_weights = graphs
        converted = cls(
            other.structure, other.bias_k, other.bias_v, project_in, project_out, returned_weights
        )
        converted.take_over(other)
        return converted

    def opaque_output_qparams(self, results: list[Tensor]) -> tuple[QParams | None, ...]:
        all_qparams = (*converted_qparams(self.project_out), *converted_qparams(self.returned_weights))
        return all_qparams[: len(results)]


def _prepare(
    module: nn.Module, example: tuple[Tensor, ...], parts: Any, specs: PartSpecs, input_dtypes: Any
) -> PartGraphModule:
    return PartGraphModule.wrap(prepare_parts(capture_flat(module, example), parts, specs, input_dtypes))
