"""``torch.ao.quantization.quantize_dynamic``: integer weights, and activations quantized at run time."""

import copy
from collections.abc import Container, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from torchq_compat.custom_modules import handler_of
from torchq_compat.errors import ConfigError
from torchq_compat.model.graph_module import record_of
from torchq_compat.read import qdq
from torchq_compat.read.observers import SMALLEST_SCALE, asks_for_whole_range, with_whole_range
from torchq_compat.recurrent.families import family_of, quantize_recurrent
from torchq_compat.recurrent.kernel.direct_calls import LINEAR_OPERATOR, LinearWeight, linear_call
from torchq_compat.recurrent.kernel.program import DynamicQParams
from torchq_compat.support import quantized_tensors, torch_ao
from torchq_compat.support.argument_checks import FLAG, checked_arguments, instance_of, optional, shown
from torchq_compat.support.graph_nodes import copied_model
from torchq_compat.support.process_state import is_exporting
from torchq_compat.support.torch_ao import QConfig, quantized
from torchq_compat.support.user_warnings import warn_user

# Read ``qconfig_spec`` of ``quantize_dynamic`` into the QConfig of every module, by path.


#: Type of submodule, or path -> QConfig; None keeps the module float.
ModuleSpec = Mapping[type | str, QConfig | None]

QCONFIGS: Mapping[torch.dtype, QConfig] = {
    torch.qint8: torch_ao.default_dynamic_qconfig,
    torch.float16: torch_ao.float16_dynamic_qconfig,
    torch.quint8: torch_ao.float_qparams_weight_only_qconfig,
    torch.quint4x2: torch_ao.float_qparams_weight_only_qconfig_4bit,
}
LINEAR_AND_RECURRENT = (nn.Linear, nn.LSTM, nn.GRU, nn.LSTMCell, nn.RNNCell, nn.GRUCell)
#: Dtype -> the types it quantizes if no spec is given; torch.ao leaves out nn.RNN.
DEFAULT_TYPES: Mapping[torch.dtype, tuple[type[nn.Module], ...]] = {
    torch.qint8: LINEAR_AND_RECURRENT,
    torch.float16: LINEAR_AND_RECURRENT,
    torch.quint8: (nn.EmbeddingBag, nn.Embedding),
    torch.quint4x2: (nn.EmbeddingBag,),
}


def read_spec(spec: Any, dtype: Any) -> ModuleSpec:
    """Read a set of types and paths, a dict of QConfigs, or None.

    Raises:
        ConfigError: anything else, or a dtype that has no default QConfig.
    """
    if isinstance(spec, Mapping):
        for key, qconfig in spec.items():
            if not isinstance(key, (str, type)) or not isinstance(qconfig, QConfig | None):
                raise ConfigError.of("TQ910.spec_entry", key=shown(key), qconfig=shown(qconfig))
        return dict(spec)
    if dtype not in QCONFIGS:
        raise ConfigError.of("TQ910.dynamic_dtype", dtype=dtype)
    if spec is None:
        return dict.fromkeys(DEFAULT_TYPES[dtype], QCONFIGS[dtype])
    if isinstance(spec, (set, frozenset, list, tuple)) and all(
        isinstance(item, (str, type)) for item in spec
    ):
        return dict.fromkeys(spec, QCONFIGS[dtype])
    raise ConfigError.of("TQ910.spec_type", spec=shown(spec))


def _warn_of_no_match(model: nn.Module, spec: ModuleSpec, paths: Container[str]) -> None:
    """Warn of the paths in ``spec`` that do not exist, and of its classes if no class matches: scripts list
    every class that can be quantized, {nn.LSTM, nn.GRU, nn.Linear}, while models have only some of them."""
    types = {type(module) for module in model.modules()}
    classes = [key for key in spec if not isinstance(key, str)]
    unmatched = [key for key in spec if isinstance(key, str) and key not in paths and key != ""]
    if types.isdisjoint(classes):
        unmatched += [key.__name__ for key in classes]
    if unmatched:
        verb = "matches" if len(unmatched) == 1 else "match"
        warn_user(
            "TQ308", what=f"qconfig_spec: {', '.join(unmatched)} {verb} no module of {type(model).__name__}."
        )


def propagated_qconfigs(
    module: nn.Module, spec: ModuleSpec, inherited: QConfig | None = None, path: str = ""
) -> Iterator[tuple[str, QConfig | None]]:
    """Yield the path and the QConfig of every module as ``torch.ao.quantization.propagate_qconfig_`` sets
    it: that of its parent, unless its type, its path or its own attribute ``qconfig`` gives another."""
    qconfig = spec.get(type(module), inherited)
    qconfig = spec.get(path, qconfig)
    qconfig = getattr(module, "qconfig", qconfig)
    yield path, qconfig
    for name, child in module.named_children():
        yield from propagated_qconfigs(child, spec, qconfig, f"{path}.{name}" if path else name)


# ``torch.ao.nn.quantized.dynamic.Linear`` whose inputs use the whole 8-bit range.
#
# torch.ao's forward requests half of the range; on CPUs without VNNI, its kernel would saturate with all of
# it. Its packed weight is an object that torch.export cannot take; here weights are plain tensors.


WHOLE_RANGE = DynamicQParams(SMALLEST_SCALE, 255, 0, 255, torch.uint8)


class _PlainWeight(quantized.modules.linear.LinearPackedParams):
    """The weight of a ``WholeRangeLinear``, with the entries of a state_dict that torch.ao's has."""

    def set_weight_bias(self, weight: Tensor, bias: Tensor | None) -> None:
        """Take a quantized ``weight``."""
        values, bias = quantized_tensors.integers_of(weight), None if bias is None else bias.detach()
        if quantized_tensors.is_per_channel(weight):
            scales, zero_points = (
                channel_qparam.clone() for channel_qparam in quantized_tensors.channel_qparams(weight)
            )
            self.qparams: tuple[Any, ...] = scales, zero_points, 0
            self.linear = LinearWeight(values, scales.float(), zero_points, bias)
        else:
            self.qparams = quantized_tensors.qparams_of(weight)
            self.linear = LinearWeight(values, None, None, bias, quantized_tensors.qparams_of(weight))
        self.call = self._call()

    def _call(self) -> tuple[Any, ...]:
        width = self.linear.values.shape[1]
        return linear_call(self.linear, ((width, None),), dynamic=WHOLE_RANGE)

    def _weight_bias(self) -> tuple[Tensor, Tensor | None]:
        make = (
            quantized_tensors.of_integers
            if self.linear.scales is None
            else quantized_tensors.of_integers_per_channel
        )
        return make(self.linear.values, *self.qparams), self.linear.bias

    def float_weight(self) -> Any:
        """Return the weight in floats, as q-dq of a graph."""
        dequantize = qdq.DEQUANTIZE if self.linear.scales is None else qdq.DEQUANTIZE_PER_CHANNEL
        return dequantize(self.linear.values, *self.qparams, -128, 127, torch.int8)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles, without the prepared call, which they make anew."""
        return {name: value for name, value in vars(self).items() if name != "call"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.call = self._call()


class WholeRangeLinear(quantized.dynamic.Linear):
    """torch.ao's dynamic Linear on this package's own matrix product; the state_dict is the same."""

    _packed_params: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]
        weight_and_bias = self._packed_params._weight_bias()
        self._packed_params = _PlainWeight()  # type: ignore[no-untyped-call]
        self._packed_params.set_weight_bias(*weight_and_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` (..., in_features) to (..., out_features), with one scale and zero point for ``x``."""
        if is_exporting() or torch._C._is_tracing():
            values, limits = x.float(), (0, 255)
            qparams = qdq.CHOOSE_QPARAMS(values, *limits, SMALLEST_SCALE, torch.uint8)
            arguments = (*qparams, *limits, torch.uint8)
            values = qdq.DEQUANTIZE_DYNAMIC(qdq.QUANTIZE_DYNAMIC(values, *arguments), *arguments)
            weight, bias = self._packed_params.float_weight(), self._packed_params.linear.bias
            return nn.functional.linear(values, weight, bias).to(x.dtype)
        if not x.numel():
            return x.new_empty(*x.shape[:-1], self.out_features)
        rows = x.reshape(-1, self.in_features).float()
        (result,) = LINEAR_OPERATOR(rows, *self._packed_params.call)
        assert isinstance(result, Tensor)
        return result.reshape(*x.shape[:-1], self.out_features).to(x.dtype)

    def __prepare_scriptable__(self) -> nn.Module:
        """Return the module's trace; torch.jit.script calls this."""
        example = torch.zeros(1, self.in_features)
        return torch.jit.trace(self, example, check_trace=False)  # type: ignore[no-untyped-call, no-any-return]

    def _get_name(self) -> str:
        return "DynamicQuantizedLinear"


# ``torch.ao.quantization.quantize_dynamic``: integer weights, and activations quantized at run time.
#
# Modules become torch.ao.nn's own, as there: scripts ask for their classes and keys, trace and script them.
# A recurrent module that torch.ao does not know becomes one of this package, which runs in its native loop.


EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
#: The namespace of torch.ao's dynamic classes; for recurrent modules, ours replace them in a mapping.
LEGACY_DYNAMIC = "torch.ao.nn.quantized.dynamic"


@checked_arguments(
    model=instance_of(nn.Module, what="an nn.Module"),
    dtype=instance_of(torch.dtype),
    mapping=optional(instance_of(Mapping, what="a mapping of classes")),
    inplace=FLAG,
    whole_range=FLAG,
)
def quantize_dynamic(
    model: nn.Module,
    qconfig_spec: Any = None,
    dtype: torch.dtype = torch.qint8,
    mapping: Mapping[type[nn.Module], Any] | None = None,
    inplace: bool = False,
    *,
    whole_range: bool = False,
) -> nn.Module:
    """Quantize the weights of an eager model; activations are quantized at run time.

    Legacy: ``torch.ao.quantization.quantize_dynamic``.

    Args:
        model: the float model; changed only if ``inplace`` is True.
        qconfig_spec: a set of module types and paths, which get the default QConfig of ``dtype``; or a dict
            from types and paths to QConfigs, which submodules inherit; None: Linear, LSTM, GRU and the cells
            for qint8 and float16, Embedding and EmbeddingBag for quint8, EmbeddingBag for quint4x2.
        dtype: ``torch.qint8``, ``torch.float16``, ``torch.quint8`` or ``torch.quint4x2``.
        mapping: type -> class with a ``from_float`` classmethod, in place of the default mapping.
        inplace: whether to change ``model`` itself.
        whole_range: whether 8-bit activations of recurrent modules and linears use all 256 integers, with
            equal numbers on every CPU and engine. On its x86 engines torch.ao uses only half of them, which
            costs 6 dB. ``torch.export`` takes these modules, and none of torch.ao's dynamic ones.

    Returns:
        The model, in evaluation mode, with quantized modules in place of float ones.

    Raises:
        ConfigError: a spec, dtype or mapping that cannot be read.

    Example:
        >>> import torch
        >>> from torchq_compat import quantize_dynamic
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 2)).eval()
        >>> quantize_dynamic(model, {torch.nn.Linear})[0].weight().dtype
        torch.qint8
    """
    if record_of(model) is not None:
        raise ConfigError.of("TQ910.quantized_already")
    spec = read_spec(qconfig_spec, dtype)
    classes: Mapping[Any, Any] = (
        torch_ao.get_default_dynamic_quant_module_mappings() if mapping is None else dict(mapping)
    )
    working = model if inplace else copied_model(model)
    working.eval()
    # All modules are converted before the first is replaced: a failure leaves the model unchanged.
    quantized: dict[nn.Module, nn.Module] = {}
    qconfigs = dict(propagated_qconfigs(working, spec))
    if qconfig_spec is not None:
        _warn_of_no_match(working, spec, qconfigs)
    if whole_range:
        qconfigs = {path: item and (with_whole_range(item) or item) for path, item in qconfigs.items()}
    for path, module in working.named_modules():
        qconfig = qconfigs.get(path)
        result = None if qconfig is None else _quantized(module, qconfig, path, classes)
        if result is not None:
            quantized[module] = result
            hand_hooks_on(module, result)
    is_asked = any(qconfig is not None for qconfig in qconfigs.values())
    if not quantized and (mapping is not None or not (is_asked or qconfig_spec)):
        warn_user("TQ411")
    if working in quantized:
        warn_user("TQ318", kind=type(working).__name__)
        return quantized[working]
    for parent in list(working.modules()):
        for name, child in list(parent.named_children()):
            if child in quantized:
                setattr(parent, name, quantized[child])
    return working


def _quantized(
    module: nn.Module, qconfig: QConfig, path: str, classes: Mapping[Any, Any]
) -> nn.Module | None:
    """Return the quantized replacement of ``module``; None to keep it."""
    kind = parametrize.type_before_parametrizations(module)
    quantized_class = classes.get(kind)
    is_legacy = str(getattr(quantized_class, "__module__", "")).startswith(LEGACY_DYNAMIC)
    family = family_of(module)
    is_recurrent = family is not None and kind is family.float_class
    if is_recurrent and (quantized_class is None or (is_legacy and _is_beyond_torch(module, qconfig))):
        leaf = quantize_recurrent(module, qconfig, path)
        handler = handler_of(leaf)
        lowered = handler.lower(leaf) if handler is not None else ""
        return leaf if isinstance(lowered, str) else lowered
    if quantized_class is None:
        return None
    obstacle = _obstacle(module, qconfig) if isinstance(module, EMBEDDINGS) else None
    if obstacle is not None:
        warn_user("TQ412", kind=kind.__name__, path=path, obstacle=obstacle)
        return None
    if not hasattr(quantized_class, "from_float"):
        raise ConfigError.of("TQ910.mapping_class", quantized_class=quantized_class)
    if asks_for_whole_range(qconfig):
        if quantized_class is WholeRangeLinear.__base__:
            quantized_class = WholeRangeLinear
        else:
            warn_user("TQ320", kind=kind.__name__, path=path)
    # from_float reads ``qconfig`` of the module; set it on a copy, as ``module`` may be the user's own.
    float_module = copy.copy(module)
    vars(float_module)["qconfig"] = qconfig
    result: nn.Module = quantized_class.from_float(float_module)
    if family is not None:
        vars(result).setdefault("flatten_parameters", _flatten_parameters)
    return result.eval()


def _flatten_parameters() -> None:
    """Do nothing: forward methods call it on LSTM and GRU, and torch.ao's classes lack it."""


def _is_beyond_torch(module: nn.Module, qconfig: QConfig) -> bool:
    """Return whether torch.ao's class of a recurrent ``module`` would refuse it or compute something else."""
    return (
        asks_for_whole_range(qconfig)
        or parametrize.is_parametrized(module)
        or not module.bias
        or bool(getattr(module, "proj_size", 0))
        or any(one.dtype != torch.float32 or one.device.type != "cpu" for one in module.parameters())
    )


def _obstacle(module: nn.Module, qconfig: QConfig) -> str | None:
    """Return why torch.ao's quantized class would refuse an embedding or compute something else, or None: the
    class keeps only the weight and the sizes, and always sums a bag."""
    if qconfig.weight().qscheme != torch.per_channel_affine_float_qparams:
        return "its qconfig is not float_qparams_weight_only_qconfig"
    if module.max_norm is not None:
        return "torch.ao's quantized class knows no max_norm"
    if isinstance(module, nn.EmbeddingBag) and (module.mode != "sum" or module.padding_idx is not None):
        return "torch.ao's quantized class only knows mode='sum' without padding_idx"
    return None


def hand_hooks_on(module: nn.Module, result: nn.Module, left_out: Container[Any] = ()) -> None:
    """Register the user's forward hooks of ``module`` on ``result``, which replaces it, as torch.ao does."""
    for hook in module._forward_pre_hooks.values():
        if hook not in left_out:
            result.register_forward_pre_hook(hook)
    for hook in module._forward_hooks.values():
        if hook not in left_out:
            result.register_forward_hook(hook)
