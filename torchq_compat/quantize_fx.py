"""``torch.ao.quantization.quantize_fx`` on PT2E: the same functions, arguments and meaning."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn
from torch.fx import GraphModule
from torchao.quantization.pt2e.quantizer import Quantizer

from torchq_compat.eager.fuse import fuse
from torchq_compat.errors import ArgumentError, ConfigError
from torchq_compat.lower.integers.lowered_module import lower_to_integers
from torchq_compat.model.graph_module import ConvertedModel, QuantizationGraphModule, record_of
from torchq_compat.quantize.convert import convert_to_reference, warn_of_loss
from torchq_compat.quantize.distributed.ranks import ready_to_convert
from torchq_compat.quantize.first_call import takes_waiting_models, waits_for_first_call
from torchq_compat.quantize.prepare import prepare
from torchq_compat.quantize.request import PrepareRequest, check_float_model, is_converted, rules_beside
from torchq_compat.read.backend_configs import read_backend_config
from torchq_compat.read.custom_configs import (
    read_convert_custom_config,
    read_fuse_custom_config,
    read_prepare_custom_config,
)
from torchq_compat.read.example_inputs import read_example_inputs
from torchq_compat.read.old_forms import takes_old_keywords
from torchq_compat.read.qconfig_mappings import DICT_KEYS, QConfigRules, read_qconfig_mapping
from torchq_compat.read.qspecs import misfit
from torchq_compat.support import argument_checks as checks
from torchq_compat.support import torch_ao
from torchq_compat.support.user_warnings import warn_user

__all__ = [
    "convert_fx",
    "convert_to_reference_fx",
    "fuse_fx",
    "get_default_convert_custom_config",
    "get_default_prepare_custom_config",
    "prepare_fx",
    "prepare_qat_fx",
]


@waits_for_first_call
@takes_old_keywords()
@checks.checked_arguments()
def prepare_fx(
    model: nn.Module,
    qconfig_mapping: torch_ao.QConfigMapping | dict[str, Any] | Quantizer,
    example_inputs: tuple[Any, ...],
    prepare_custom_config: torch_ao.PrepareCustomConfig | dict[str, Any] | None = None,
    _equalization_config: torch_ao.QConfigMapping | dict[str, Any] | None = None,
    backend_config: torch_ao.BackendConfig | dict[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    fuse_as_fx: bool = False,
    custom_module_qconfig: torch_ao.QConfig | torch_ao.QConfigMapping | dict[str, Any] | None = None,
) -> QuantizationGraphModule:
    """Prepare a model for post-training quantization.

    Legacy: ``torch.ao.quantization.quantize_fx.prepare_fx``. The returned model is in evaluation mode and
    observes when called; ``model`` itself is not changed and shares no storage with it.

    Args:
        model: the float model.
        qconfig_mapping: a QConfigMapping or its dict form; or a torchao ``Quantizer``, which annotates
            everything but custom modules. A recurrent module that is not mapped is left to the Quantizer,
            if it annotates the operator, such as ``aten.lstm.input``, or writes it as others.
        example_inputs: one example of every positional argument; only their structure, dtypes and ranks
            matter, and every size stays free unless the model fixes it. A bare tensor, a list, and a dict of
            forward's parameters are accepted too, with a QuantizationWarning that names the tuple to write.
        prepare_custom_config: a PrepareCustomConfig or its dict form.
        backend_config: a BackendConfig or its dict form; default: torch.ao's native backend.
        dynamic_shapes: which sizes stay free, in the form ``torch.export.export`` accepts; default: every
            size that can.
        fuse_as_fx: whether only the batch norms that FX folds are folded: behind modules of torch.nn's own
            classes. By default also those behind functions and subclasses, and in subclasses.
        custom_module_qconfig: beside a Quantizer, the QConfig, or a QConfigMapping, of custom modules that
            have no ``qconfig`` themselves or from a module around them; default: what the Quantizer annotates
            a linear layer in their place with.

    Returns:
        The observed model, called with the arguments of ``model``: tensors of the same dtypes and any free
        sizes.

    Raises:
        InputError: ``example_inputs`` hold a PackedSequence.
        ConfigError: a setting cannot be read or is not supported.
        CaptureError: torch.export cannot capture the model; the message names the user's line.
        CustomModuleError: an observed class does not do what the mapping requires of it.
        AnnotationError: specs of a Quantizer cannot be applied; see ``check_annotations``.

    Example:
        >>> import torch
        >>> from torch.ao.quantization import get_default_qconfig_mapping
        >>> from torchq_compat import prepare_fx
        >>> model, x = torch.nn.Sequential(torch.nn.Linear(4, 2)).eval(), torch.randn(3, 4)
        >>> prepared = prepare_fx(model, get_default_qconfig_mapping("x86"), (x,))
        >>> prepared(torch.randn(50, 4)).shape
        torch.Size([50, 2])
    """
    return _prepare(**locals(), is_qat=False)


@waits_for_first_call
@takes_old_keywords()
@checks.checked_arguments()
def prepare_qat_fx(
    model: nn.Module,
    qconfig_mapping: torch_ao.QConfigMapping | dict[str, Any] | Quantizer,
    example_inputs: tuple[Any, ...],
    prepare_custom_config: torch_ao.PrepareCustomConfig | dict[str, Any] | None = None,
    backend_config: torch_ao.BackendConfig | dict[str, Any] | None = None,
    *,
    _equalization_config: torch_ao.QConfigMapping | dict[str, Any] | None = None,
    dynamic_shapes: Any = None,
    fuse_as_fx: bool = False,
    custom_module_qconfig: torch_ao.QConfig | torch_ao.QConfigMapping | dict[str, Any] | None = None,
) -> QuantizationGraphModule:
    """Prepare a model for quantization-aware training.

    Legacy: ``torch.ao.quantization.quantize_fx.prepare_qat_fx``, which has no ``_equalization_config``;
    ``backend_config`` is the fifth argument there too.

    Args:
        model: the float model. The other arguments and the errors are those of ``prepare_fx``.

    Returns:
        The model with fake-quantizes, in training mode.

    Example:
        >>> import torch
        >>> from torch.ao.quantization import get_default_qat_qconfig_mapping
        >>> from torchq_compat import prepare_qat_fx
        >>> model, x = torch.nn.Sequential(torch.nn.Linear(4, 2)).train(), torch.randn(3, 4)
        >>> prepared = prepare_qat_fx(model, get_default_qat_qconfig_mapping("x86"), (x,))
        >>> prepared(x).sum().backward()  # train it as any module
    """
    return _prepare(**locals(), is_qat=True)


@takes_waiting_models
@takes_old_keywords(reference=lambda: _reference())
@checks.checked_arguments(
    _remove_qconfig=checks.FLAG, keep_original_weights=checks.FLAG, observer_qparams=checks.FLAG
)
def convert_fx(
    graph_module: GraphModule,
    convert_custom_config: torch_ao.ConvertCustomConfig | dict[str, Any] | None = None,
    _remove_qconfig: bool = True,
    qconfig_mapping: torch_ao.QConfigMapping | dict[str, Any] | None = None,
    backend_config: torch_ao.BackendConfig | dict[str, Any] | None = None,
    keep_original_weights: bool = False,
    *,
    observer_qparams: bool = False,
) -> ConvertedModel:
    """Convert a calibrated or trained model.

    Legacy: ``torch.ao.quantization.quantize_fx.convert_fx``. On an x86 CPU, with
    ``torch.backends.quantized.engine`` x86, onednn or fbgemm, the result runs the integer kernels that FX's
    result ran; ``explain`` says where it does not. The result is a GraphModule with the state_dict of
    ``convert_to_reference_fx``; its ``reference`` is that q-dq graph, which torch.export and torch.compile
    capture. With another engine or machine, only recurrent modules and linear layers run on integers, the
    rest in floats between its q-dq, with a QuantizationWarning. ``_remove_qconfig``, ``backend_config`` and
    ``keep_original_weights`` have no effect here; a value that has one in FX is warned about.

    Args:
        graph_module: the model that ``prepare_fx`` or ``prepare_qat_fx`` returned, calibrated or trained, or
            DistributedDataParallel around it. It is not changed. If ``fully_shard`` sharded it, every rank
            has to convert.
        convert_custom_config: a ConvertCustomConfig or its dict form.
        qconfig_mapping: the mapping given to prepare, with None for what is to stay float after all.
        observer_qparams: for trained models: convert with the qparams of each fake-quantize's observer over
            the dtype's whole range, as FX and torchao compute them, instead of those it trained with. Parts
            of mapped recurrent modules keep those they trained with.

    Returns:
        The quantized model, in evaluation mode, called with the arguments of the float model; float32
        tensors in and out.

    Raises:
        ConvertError: ``graph_module`` was not prepared by this package, or an observer has seen NaN or
            infinity.
        ConfigError: a setting cannot be read or is not supported, or ``qconfig_mapping`` differs from that
            of prepare in more than entries set to None.
        CustomModuleError: a quantized class does not do what the mapping requires of it.

    Example:
        >>> import torch
        >>> from torch.ao.quantization import get_default_qconfig_mapping
        >>> from torchq_compat import convert_fx, prepare_fx
        >>> model, x = torch.nn.Sequential(torch.nn.Linear(4, 2)).eval(), torch.randn(3, 4)
        >>> prepared = prepare_fx(model, get_default_qconfig_mapping("x86"), (x,))
        >>> _ = prepared(torch.randn(50, 4))  # calibrate
        >>> convert_fx(prepared)(x).shape
        torch.Size([3, 2])
    """
    backend = None if backend_config is None else read_backend_config(backend_config)
    settings = read_convert_custom_config(convert_custom_config)
    _warn_unused(remove_qconfig=_remove_qconfig, keep_original_weights=keep_original_weights)
    rules = _read_convert_mapping(qconfig_mapping)
    graph_module = ready_to_convert(graph_module, "convert_fx")
    reference = convert_to_reference(
        graph_module, settings, rules, backend, observer_qparams=observer_qparams
    )
    record = record_of(graph_module)
    lowered = lower_to_integers(reference, None if record is None else record.trial_inputs)
    warn_of_loss(graph_module, lowered)
    return lowered


@takes_waiting_models
@takes_old_keywords()
@checks.checked_arguments(_remove_qconfig=checks.FLAG, observer_qparams=checks.FLAG)
def convert_to_reference_fx(
    graph_module: GraphModule,
    convert_custom_config: torch_ao.ConvertCustomConfig | dict[str, Any] | None = None,
    _remove_qconfig: bool = True,
    qconfig_mapping: torch_ao.QConfigMapping | dict[str, Any] | None = None,
    backend_config: torch_ao.BackendConfig | dict[str, Any] | None = None,
    *,
    observer_qparams: bool = False,
) -> ConvertedModel:
    """Convert a calibrated or trained model to a portable q-dq graph of ``quantized_decomposed`` operators.

    Legacy: ``torch.ao.quantization.quantize_fx.convert_to_reference_fx``.

    Args:
        graph_module: the prepared, calibrated or trained model; it is not changed.
        convert_custom_config: observed-to-quantized classes and preserved attributes.
        _remove_qconfig: has no effect; no module has a qconfig.
        qconfig_mapping: the mapping given to prepare, with None for what is to stay float, as in
            ``convert_fx``.
        backend_config: checked as in ``convert_fx``, without effect.
        observer_qparams: as in ``convert_fx``.

    Returns:
        The q-dq graph, for export and for any backend.

    Raises:
        TorchQCompatError: the errors of ``convert_fx``.

    Example:
        >>> import torch
        >>> from torch.ao.quantization import get_default_qconfig_mapping
        >>> from torchq_compat import convert_to_reference_fx, prepare_fx
        >>> model, x = torch.nn.Sequential(torch.nn.Linear(4, 2)).eval(), torch.randn(3, 4)
        >>> prepared = prepare_fx(model, get_default_qconfig_mapping("x86"), (x,))
        >>> _ = prepared(torch.randn(50, 4))  # calibrate
        >>> reference = convert_to_reference_fx(prepared)
        >>> [node.name for node in reference.graph.nodes if "dequantize" in node.name][-1]
        'dequantize_per_tensor...'
    """
    backend = None if backend_config is None else read_backend_config(backend_config)
    settings = read_convert_custom_config(convert_custom_config)
    _warn_unused(remove_qconfig=_remove_qconfig)
    rules = _read_convert_mapping(qconfig_mapping)
    graph_module = ready_to_convert(graph_module, "convert_to_reference_fx")
    reference = convert_to_reference(
        graph_module, settings, rules, backend, observer_qparams=observer_qparams
    )
    warn_of_loss(graph_module, reference)
    return reference


@takes_old_keywords()
@checks.checked_arguments(model=checks.instance_of(nn.Module, what="an nn.Module"))
def fuse_fx(
    model: nn.Module,
    fuse_custom_config: torch_ao.FuseCustomConfig | dict[str, Any] | None = None,
    backend_config: torch_ao.BackendConfig | dict[str, Any] | None = None,
) -> nn.Module:
    """Fuse each convolution and linear module with the batch norm and the ReLU after it.

    Legacy: ``torch.ao.quantization.quantize_fx.fuse_fx``. ``prepare_fx`` does not need it: it fuses on the
    exported graph.

    Args:
        model: the float model, in evaluation mode if it has batch norms after convolutions or linear modules.
            It is not changed.
        fuse_custom_config: a FuseCustomConfig or its dict form.
        backend_config: a BackendConfig or its dict form; its patterns with a fuser method are fused instead.

    Returns:
        A GraphModule with modules of ``torch.ao.nn.intrinsic``; ``model`` itself, with a QuantizationWarning,
        if torch.fx cannot trace it.

    Raises:
        InputError: a batch norm to be folded is in training mode.
        ConfigError: a setting cannot be read, or a fuser method fails.

    Example:
        >>> import torch
        >>> from torchq_compat import fuse_fx
        >>> model = torch.nn.Sequential(torch.nn.Conv1d(1, 1, 1), torch.nn.ReLU()).eval()
        >>> type(getattr(fuse_fx(model), "0")).__name__
        'ConvReLU1d'
    """
    preserved = read_fuse_custom_config(fuse_custom_config)
    return fuse(model, preserved, read_backend_config(backend_config))


def _reference() -> Callable[..., ConvertedModel]:
    return convert_to_reference_fx


@checks.checked_arguments(
    profile=checks.optional(replace(checks.FUNCTION, what="a function of torchq_compat.profiles"))
)
def get_default_prepare_custom_config(
    profile: Callable[..., dict[str, Any]] | None = None,
) -> torch_ao.PrepareCustomConfig:
    """Return a config that maps torch.nn classes to the classes of the same names in ``nn.quantizable``.

    Legacy: torch.ao has no such function; FX's backends map LSTM and MultiheadAttention.

    Args:
        profile: a function of ``torchq_compat.profiles`` that says how the parts of recurrent modules are
            observed; without one all follow the QConfig, with FX's numbers. ``int8_products`` is the one to
            choose where no FX script decides: 37 to 39 dB at the same speed, where FX's parts have 25 to 30.

    Raises:
        ArgumentError: ``profile`` cannot be called.

    Example:
        >>> import torch
        >>> from torchq_compat import get_default_prepare_custom_config, profiles
        >>> config = get_default_prepare_custom_config(profiles.int8_products)
        >>> torch.nn.LSTM in next(iter(config.float_to_observed_mapping.values()))
        True
    """
    from torchq_compat.nn import quantizable
    from torchq_compat.recurrent.families import FAMILIES, with_profile

    recurrent = [family.float_class for family in FAMILIES]
    config = torch_ao.PrepareCustomConfig()
    for name in quantizable.__all__:
        float_class, observed = getattr(nn, name), getattr(quantizable, name)
        if profile is not None and float_class in recurrent:
            observed = with_profile(observed, profile)
        config.set_float_to_observed_mapping(float_class, observed)
    return config


@checks.checked_arguments()
def get_default_convert_custom_config() -> torch_ao.ConvertCustomConfig:
    """Return the ``convert_fx`` config that belongs to ``get_default_prepare_custom_config``.

    Example:
        >>> from torchq_compat import get_default_convert_custom_config
        >>> len(get_default_convert_custom_config().observed_to_quantized_mapping)
        1
    """
    from torchq_compat.nn import quantizable, quantized

    config = torch_ao.ConvertCustomConfig()
    for name in quantizable.__all__:
        config.set_observed_to_quantized_mapping(getattr(quantizable, name), getattr(quantized, name))
    return config


def _prepare(
    *,
    model: nn.Module,
    qconfig_mapping: Any,
    example_inputs: Any,
    prepare_custom_config: Any,
    _equalization_config: Any,
    backend_config: Any,
    dynamic_shapes: Any,
    fuse_as_fx: bool,
    custom_module_qconfig: Any,
    is_qat: bool,
) -> QuantizationGraphModule:
    name = "prepare_qat_fx" if is_qat else "prepare_fx"
    checks.check_arguments(name, {"fuse_as_fx": checks.FLAG}, {"fuse_as_fx": fuse_as_fx})
    if _equalization_config is not None and _asks_for_something(_equalization_config):
        raise ConfigError.of("TQ910.equalization")
    quantizer = qconfig_mapping if isinstance(qconfig_mapping, Quantizer) else None
    if quantizer is not None:
        if backend_config is not None:
            raise ConfigError.of("TQ910.backend_config_and_quantizer")
    elif custom_module_qconfig is not None:
        raise ConfigError.of("TQ910.custom_module_qconfig")
    if not isinstance(model, nn.Module) and isinstance(qconfig_mapping, nn.Module):
        raise ArgumentError.of("TQ903.order", name=name, model=checks.shown(model))
    settings, backend = read_prepare_custom_config(prepare_custom_config), read_backend_config(backend_config)
    check_float_model(model)
    converted = tuple(path for path, module in model.named_modules() if is_converted(module))
    settings = replace(settings, kept_float_names=(*settings.kept_float_names, *converted))
    if quantizer is None:
        rules = read_qconfig_mapping(qconfig_mapping)
    else:
        rules = rules_beside(quantizer, model, settings, custom_module_qconfig, is_qat=is_qat)
    request = PrepareRequest(
        rules=rules,
        quantizer=quantizer,
        example_inputs=read_example_inputs(example_inputs, model),
        settings=settings,
        backend=backend,
        dynamic_shapes=dynamic_shapes,
        is_qat=is_qat,
        fuse_as_fx=fuse_as_fx,
    )
    prepared = prepare(model, request)
    problem = misfit(rules.qconfigs, is_qat=is_qat) if quantizer is None else ""
    if problem:
        warn_user("TQ310", what=problem)
    return prepared


def _asks_for_something(equalization_config: Any) -> bool:
    """Return whether ``equalization_config`` is more than FX's default, an empty QConfigMapping."""
    mapping = equalization_config
    if isinstance(mapping, dict) and set(mapping) <= set(DICT_KEYS):
        mapping = torch_ao.QConfigMapping.from_dict(mapping)
    if not isinstance(mapping, torch_ao.QConfigMapping):
        return True
    levels = (level.values() if isinstance(level, dict) else [level] for level in vars(mapping).values())
    return any(qconfig is not None for level in levels for qconfig in level)


def _warn_unused(*, remove_qconfig: bool, keep_original_weights: bool = False) -> None:
    """Warn about arguments that were given a value and have no effect."""
    if not remove_qconfig:
        warn_user(
            "TQ304", argument="_remove_qconfig=False", why="the modules of a converted model have no qconfig"
        )
    if keep_original_weights:
        warn_user(
            "TQ304",
            argument="keep_original_weights=True",
            why="the converted model has the quantized weights only",
        )


def _read_convert_mapping(value: Any) -> QConfigRules | None:
    # FX treats an empty dict like None.
    return read_qconfig_mapping(value) if value is not None and value != {} else None
