"""nn.MultiheadAttention, observed and converted, behind its calling contract."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from torchq_compat.annotate.observed_graph import ObserverFault
from torchq_compat.capture.call_layouts import CallLayout, input_labels
from torchq_compat.capture.opaque_calls import OpaqueBoundary, OpaqueModule
from torchq_compat.capture.opaque_stub import FakeCall
from torchq_compat.capture.torch_export import capture_flat
from torchq_compat.errors import CustomModuleError
from torchq_compat.fx_state.numbered import Required
from torchq_compat.fx_state.states import FxState
from torchq_compat.modules import parts, parts_handler
from torchq_compat.modules.registry import ObserveRequest, RequiredByModel, register
from torchq_compat.read.qparams import QParams
from torchq_compat.read.qspecs import OpSpecs
from torchq_compat.support.argument_checks import checked_arguments, instance_of
from torchq_compat.support.dtypes import as_dtype
from torchq_compat.support.torch_ao import quantizable, quantized

# The quantized parts of attention, which FX observes in ``torch.ao.nn.quantizable.MultiheadAttention``.
#
# They are the projections into queries, keys and values, the output projection, and the returned weights.
# As in FX, scores, softmax and the weighted sum are computed in floats.


PROJECTION_PARTS = (
    parts.Part("linear_Q", parts.PartKind.LINEAR, "linear_output", "W_q query + b_q"),
    parts.Part("linear_K", parts.PartKind.LINEAR, "linear_output", "W_k key + b_k"),
    parts.Part("linear_V", parts.PartKind.LINEAR, "linear_output", "W_v value + b_v"),
)
OUT_PARTS = (
    parts.Part("quant_attn_output", parts.PartKind.IDENTITY, "attention", "softmax(q k / sqrt(d)) v"),
    parts.Part("out_proj", parts.PartKind.LINEAR, "output", "W_o attention + b_o"),
)
WEIGHTS_PARTS = (
    parts.Part(
        "quant_attn_output_weights", parts.PartKind.IDENTITY, "attention_weights", "softmax(q k / sqrt(d))"
    ),
)


class ProjectIn(nn.Module):
    """Input projections: (L, N, E), (S, N, kdim), (S, N, vdim) -> (L, N, E), (S, N, E), (S, N, E)."""

    def __init__(self, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        biases: tuple[Tensor | None, ...] = (None,) * 3
        if attention.in_proj_bias is not None:
            biases = attention.in_proj_bias.chunk(3)
        weights: Any = (attention.q_proj_weight, attention.k_proj_weight, attention.v_proj_weight)
        if attention.in_proj_weight is not None:
            weights = attention.in_proj_weight.chunk(3)
        self.linear_Q, self.linear_K, self.linear_V = map(parts.own_linear, weights, biases)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.linear_Q(query), self.linear_K(key), self.linear_V(value)

    @staticmethod
    def example_inputs(attention: nn.MultiheadAttention) -> tuple[Tensor, ...]:
        device = attention.out_proj.weight.device
        # The two lengths differ from each other and from the batch, so that export does not make them equal.
        return (
            torch.zeros(3, 2, attention.embed_dim, device=device),
            torch.zeros(4, 2, attention.kdim, device=device),
            torch.zeros(4, 2, attention.vdim, device=device),
        )


class ProjectOut(nn.Module):
    """The output projection: (L, N, E) -> (L, N, E)."""

    def __init__(self, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        self.quant_attn_output = parts.ObservedValue()
        self.out_proj = parts.own_linear(attention.out_proj.weight, attention.out_proj.bias)

    def forward(self, attended: Tensor) -> tuple[Tensor, ...]:
        return (self.out_proj(self.quant_attn_output(attended)),)


class ReturnedWeights(nn.Module):
    """The returned weights, (N, L, S) or (N, H, L, S) flattened to one dimension -> the same, observed."""

    def __init__(self) -> None:
        super().__init__()
        self.quant_attn_output_weights = parts.ObservedValue()

    def forward(self, weights: Tensor) -> tuple[Tensor, ...]:
        return (self.quant_attn_output_weights(weights),)


# The calling contract of nn.MultiheadAttention: arguments, masks and shapes.
#
# Source: the documentation of torch.nn.MultiheadAttention. Shapes are written with L target length, S source
# length, N batch, E embedding, H heads.


SIGNATURE = inspect.signature(nn.MultiheadAttention.forward)


@dataclass(frozen=True)
class AttentionStructure:
    """The constructor arguments of a torch.nn.MultiheadAttention."""

    embed_dim: int
    num_heads: int
    dropout: float
    batch_first: bool
    kdim: int
    vdim: int
    add_zero_attn: bool

    @classmethod
    def of(cls, module: nn.MultiheadAttention) -> AttentionStructure:
        given = {field.name: getattr(module, field.name) for field in fields(cls)}
        return cls(**{**given, "dropout": float(module.dropout)})

    @property
    def head_dim(self) -> int:
        return self.embed_dim // self.num_heads


@dataclass(frozen=True)
class AttentionCall:
    """One call, with inputs of shape (length, batch, width).

    Attributes:
        query: (L, N, E).
        key: (S, N, kdim).
        value: (S, N, vdim).
        mask: the mask added to the scores, broadcastable to (N, H, L, S), or None.
        need_weights: whether the weights are returned.
        average: whether the returned weights are averaged over the heads.
        batched: whether the caller's inputs have a batch dimension.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    need_weights: bool
    average: bool
    batched: bool

    @classmethod
    def read(cls, structure: AttentionStructure, path: str, args: Any, kwargs: Any) -> AttentionCall:
        """Return the call ``attention(*args, **kwargs)``.

        Raises:
            CustomModuleError: if nn.MultiheadAttention would refuse the arguments; names ``path``.
        """
        try:
            bound = SIGNATURE.bind(None, *args, **kwargs)
        except TypeError as cause:
            raise CustomModuleError.call_failed(path, str(cause)) from cause
        bound.apply_defaults()
        given = bound.arguments
        if given["is_causal"] and given["attn_mask"] is None:
            raise CustomModuleError.call_failed(path, "is_causal is a hint about attn_mask, which is missing")
        inputs = (given["query"], given["key"], given["value"])
        _check_inputs(structure, path, inputs)
        batched = given["query"].dim() == 3
        query, key, value = (_length_first(structure, tensor, batched) for tensor in inputs)
        mask = _merge_masks(structure, path, given, query, key)
        return cls(query, key, value, mask, given["need_weights"], given["average_attn_weights"], batched)

    def results(
        self, structure: AttentionStructure, output: Tensor, weights: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return ``output`` (L, N, E) and ``weights`` (N, L, S) or (N, H, L, S) in the form the caller
        expects."""
        if not self.batched:
            return output.squeeze(1), None if weights is None else weights.squeeze(0)
        return (output.transpose(0, 1) if structure.batch_first else output), weights


def _length_first(structure: AttentionStructure, tensor: Tensor, batched: bool) -> Tensor:
    if not batched:
        return tensor.unsqueeze(1)
    return tensor.transpose(0, 1) if structure.batch_first else tensor


def _check_inputs(structure: AttentionStructure, path: str, inputs: tuple[Any, ...]) -> None:
    widths = (structure.embed_dim, structure.kdim, structure.vdim)
    for name, tensor, width in zip(("query", "key", "value"), inputs, widths, strict=True):
        if not isinstance(tensor, Tensor) or tensor.is_nested:
            raise CustomModuleError.call_failed(path, f"{name} must be a dense tensor")
        if tensor.dim() not in (2, 3) or tensor.dim() != inputs[0].dim():
            raise CustomModuleError.call_failed(path, f"{name} must have 2 or 3 dimensions, as query")
        if tensor.shape[-1] != width:
            raise CustomModuleError.call_failed(path, f"the last dimension of {name} must be {width}")


def _merge_masks(
    structure: AttentionStructure, path: str, given: Mapping[str, Any], query: Tensor, key: Tensor
) -> Tensor | None:
    """Return attn_mask and key_padding_mask as one float mask, where True becomes -inf."""
    merged: Tensor | None = None
    attn_mask, key_padding_mask = given["attn_mask"], given["key_padding_mask"]
    for name, mask in (("attn_mask", attn_mask), ("key_padding_mask", key_padding_mask)):
        if mask is not None and not (mask.dtype is torch.bool or mask.is_floating_point()):
            raise CustomModuleError.call_failed(path, f"{name} must be bool or floating point")
    length, source, batch, heads = query.shape[0], key.shape[0], query.shape[1], structure.num_heads
    if attn_mask is not None:
        if attn_mask.dim() not in (2, 3):
            raise CustomModuleError.call_failed(path, "attn_mask must have 2 or 3 dimensions")
        leading = () if attn_mask.dim() == 2 else (batch * heads,)
        _check_shape(path, "attn_mask", attn_mask, (*leading, length, source))
        merged = _additive(attn_mask)
        if attn_mask.dim() == 3:
            merged = merged.reshape(batch, heads, length, source)
    if key_padding_mask is not None:
        padding = key_padding_mask if given["query"].dim() == 3 else key_padding_mask.unsqueeze(0)
        _check_shape(path, "key_padding_mask", padding, (batch, source))
        padding = _additive(padding)[:, None, None]
        merged = padding if merged is None else merged + padding
    return merged


def _additive(mask: Tensor) -> Tensor:
    if mask.is_floating_point():
        return mask.float()
    return torch.zeros_like(mask, dtype=torch.float32).masked_fill(mask, float("-inf"))


def _check_shape(path: str, name: str, mask: Tensor, expected: tuple[Any, ...]) -> None:
    if tuple(mask.shape) != expected:
        raise CustomModuleError.call_failed(path, f"the size of {name} does not fit query and key")


# MultiheadAttention, observed and converted.
#
# Legacy: ``torch.ao.nn.quantizable.MultiheadAttention`` and ``torch.ao.nn.quantized.MultiheadAttention``,
# which FX maps and then crashes on, whatever the call style. The classes here derive from them.


class AttentionModule(parts.PartOwner):
    """The base class of the observed and the converted module.

    Args:
        structure: the constructor arguments of the float module.
        bias_k: (1, 1, E), appended to the keys in floats, or None.
        bias_v: (1, 1, E), appended to the values in floats, or None.
        graphs: the projections of query, key and value, the projection of the attended values, and what
            observes the attention weights that a call returns.
    """

    inputs_named_as = nn.MultiheadAttention
    graphs_of_results = ("project_out", "returned_weights")
    project_in: GraphModule
    project_out: GraphModule
    returned_weights: GraphModule

    def __init__(
        self,
        structure: AttentionStructure,
        bias_k: Tensor | None,
        bias_v: Tensor | None,
        *graphs: GraphModule,
    ) -> None:
        super().__init__()
        self.structure = structure
        vars(self).update(vars(structure), head_dim=structure.head_dim)
        self.bias_k = bias_k
        self.bias_v = bias_v
        self.project_in, self.project_out, self.returned_weights = graphs

    def graphs(self) -> Iterator[tuple[str, GraphModule]]:
        for name in ("project_in", *self.graphs_of_results):
            yield name, self.get_submodule(name)  # type: ignore[misc]

    def result_dtypes(self, count: int) -> tuple[torch.dtype | None, ...]:
        return (self.specs.group_dtype("output"), self.specs.group_dtype("attention_weights"))[:count]

    def opaque_call(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Run a call of ``torch.nn.MultiheadAttention``.

        Raises:
            CustomModuleError: if the float module would refuse the arguments.
        """
        output, weights = self.opaque_call_from_graph(None, args, kwargs)
        return self.in_floats(0, output), None if weights is None else self.in_floats(1, weights)

    def opaque_call_from_graph(
        self, layout: CallLayout | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """Run a call; a lowered module takes and returns integers."""
        call = AttentionCall.read(self.structure, self.module_path, args, kwargs)
        dtype = call.query.dtype if call.query.is_floating_point() else torch.float32
        inputs = zip(QUANTIZED_INPUTS, (call.query, call.key, call.value), strict=True)
        q, k, v = self.project_in(*(self.as_graphs_take(*item) for item in inputs))
        attended, weights = self._attend(q, k, v, call.mask, need_weights=call.need_weights)
        (output,) = self.project_out(attended)
        returned: Tensor | None = None
        if call.need_weights:
            assert weights is not None
            expected = weights.mean(1) if call.average else weights
            (flat,) = self.returned_weights(expected.flatten())
            returned = _in_dtype(flat.view_as(expected), dtype)
        return call.results(self.structure, _in_dtype(output, dtype), returned)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return attended values (L, N, E) and weights (N, H, L, S), computed in floats; a lowered module
        computes no weights that nobody needs."""
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat([k, self.bias_k.expand(1, k.shape[1], -1)])
            v = torch.cat([v, self.bias_v.expand(1, v.shape[1], -1)])
        # (length, N, E) -> (N, H, length, E / H)
        heads = (self.structure.num_heads, self.structure.head_dim)
        queries, keys, values = (x.reshape(*x.shape[:2], *heads).permute(1, 2, 0, 3) for x in (q, k, v))
        if self.structure.add_zero_attn:
            keys, values = (F.pad(tensor, (0, 0, 0, 1)) for tensor in (keys, values))
        if mask is not None:
            mask = F.pad(mask, (0, keys.shape[2] - mask.shape[-1]))
        if self.is_lowered and not need_weights:
            attended = F.scaled_dot_product_attention(queries, keys, values, mask)
            return attended.permute(2, 0, 1, 3).flatten(2), None
        scores = (queries * self.structure.head_dim**-0.5) @ keys.transpose(-2, -1)
        scores = scores if mask is None else scores + mask
        weights = F.dropout(scores.softmax(-1), self.structure.dropout, self.training)
        attended = (weights @ values).permute(2, 0, 1, 3).flatten(2)
        return attended, weights


class ObservedMultiheadAttention(AttentionModule, quantizable.MultiheadAttention):
    """A MultiheadAttention whose projections are observed, or fake-quantized."""

    def _get_name(self) -> str:
        return "QuantizableMultiheadAttention"

    @classmethod
    def observe(cls, module: nn.MultiheadAttention, specs: parts.PartSpecs) -> Self:
        """Return an observed module with copies of the parameters of the float ``module``."""
        activation = specs.op_specs.activation_dtype
        inputs = dict.fromkeys(("query", "key", "value"), activation)
        device = module.out_proj.weight.device
        attended = torch.zeros(3, 2, module.embed_dim, device=device)
        observed = cls(
            AttentionStructure.of(module),
            None if module.bias_k is None else parts.own_parameter(module.bias_k),
            None if module.bias_v is None else parts.own_parameter(module.bias_v),
            _prepare(ProjectIn(module), ProjectIn.example_inputs(module), PROJECTION_PARTS, specs, inputs),
            _prepare(ProjectOut(module), (attended,), OUT_PARTS, specs, {"attended": activation}),
            _prepare(ReturnedWeights(), (torch.zeros(4, device=device),), WEIGHTS_PARTS, specs, {}),
        )
        return observed.observed_by(specs, training=module.training)

    @classmethod
    @checked_arguments(other=instance_of(nn.MultiheadAttention))
    def from_float(cls, other: nn.MultiheadAttention) -> Any:
        """Observe the float module ``other`` by its qconfig. Legacy signature.

        Raises:
            CustomModuleError: if it has no qconfig.
        """
        qconfig = getattr(other, "qconfig", None)
        if qconfig is None:
            raise CustomModuleError.of("TQ940.no_qconfig", other=other)
        return cls.observe(other, parts.PartSpecs(OpSpecs(qconfig)))


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
            raise CustomModuleError.of("TQ940.not_observed_here", result=other)
        graphs = [
            parts.ConvertedPartGraphModule.wrap(parts.convert_parts(copy.deepcopy(graph)))
            for _, graph in other.graphs()
        ]
        converted = cls(other.structure, other.bias_k, other.bias_v, *graphs)
        converted.take_over(other)
        return converted

    def opaque_output_qparams(self, results: list[Tensor]) -> tuple[QParams | None, ...]:
        graphs = self.project_out, self.returned_weights
        all_qparams = tuple(qparams for graph in graphs for qparams in parts.converted_qparams(graph))
        return all_qparams[: len(results)]


def _in_dtype(result: Tensor, dtype: torch.dtype) -> Tensor:
    return as_dtype(result, dtype) if result.is_floating_point() else result


def _prepare(module: nn.Module, example: tuple[Tensor, ...], *settings: Any) -> parts.PartGraphModule:
    return parts.PartGraphModule.wrap(parts.prepare_parts(capture_flat(module, example), *settings))


# The handler of nn.MultiheadAttention, which the stages call.


QUANTIZED_INPUTS = ("query", "key", "value")


class AttentionHandler(parts_handler.FamilyHandler):
    """The handler of nn.MultiheadAttention -> ObservedMultiheadAttention -> ConvertedMultiheadAttention."""

    lowers_graphs = True
    unusable = "TQ940.not_observed_here"

    def fake_call(self, module: nn.Module, path: str) -> FakeCall:
        assert isinstance(module, nn.MultiheadAttention)
        structure = AttentionStructure.of(module)
        appended = int(module.bias_k is not None) + int(module.add_zero_attn)

        def fake(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
            call = AttentionCall.read(structure, path, args, kwargs)
            length, batch, _ = call.query.shape
            heads = () if call.average else (structure.num_heads,)
            shape = (batch, *heads, length, call.key.shape[0] + appended)
            weights = call.query.new_empty(shape) if call.need_weights else None
            return call.results(structure, torch.empty_like(call.query), weights)

        return fake

    def boundary(self, opaque: OpaqueModule, request: ObserveRequest, layout: CallLayout) -> OpaqueBoundary:
        """Return a boundary that quantizes query, key and value, but not masks, which may hold -inf."""
        labels = input_labels(nn.MultiheadAttention, layout.inputs)
        spec = request.specs.activation
        inputs = tuple(spec if label in QUANTIZED_INPUTS else None for label in labels)
        return replace(super().boundary(opaque, request, layout), input_specs=inputs)

    def observer_faults(self, opaque: OpaqueModule) -> list[tuple[str, ObserverFault]]:
        """Return the faults, except unseen observers of returned weights if no call returns weights."""
        returned = any(layout.outputs.count() > 1 for layout in opaque.opaque_layouts)
        return [
            (name, fault)
            for name, fault in super().observer_faults(opaque)
            if returned or fault is not ObserverFault.UNSEEN or not name.startswith("returned_weights")
        ]

    def required_of_fx(
        self, opaque: OpaqueModule, state: FxState, prefix: str, required_by_model: RequiredByModel
    ) -> Required:
        """Return the base class's; the observer of the scaled query is torch.ao's alone."""
        assert isinstance(opaque, AttentionModule)
        for name in ("in_proj_weight", "in_proj_bias"):
            # torch.ao's observed module has them still, beside linear_Q, K and V.
            state.forgive(f"{prefix}.{name}")
        expected = Required(only_fx=(f"{prefix}.q_scaling_product.activation_post_process",))
        for path, graph in opaque.graphs():
            expected += parts_handler.required_by_parts(graph, prefix).below(path)
        return expected


OURS = ObservedMultiheadAttention, ConvertedMultiheadAttention
LEGACY = quantizable.MultiheadAttention, quantized.MultiheadAttention
register(AttentionHandler(parts_handler.ModuleFamily(nn.MultiheadAttention, *OURS, *LEGACY)))
