"""``torch.ao.quantization``'s eager mode: the same functions, arguments and meaning, without its engine.

An eager model is an ``nn.Module`` and stays one. Its Python runs as it is: nothing is captured, so control
flow, hooks, training flags and models without example inputs work as they did. ``prepare`` puts observers
into the modules that have a qconfig, under torch.ao's names; ``prepare_qat`` makes them train with
fake-quantized weights; ``convert`` replaces them, at their paths, by modules that compute q-dq of plain
integer weights and of results, by the qparams observed.

There are no quantized tensors: between the stubs values are floats that lie on a grid, and a converted model
rounds to the grid what functions such as ``mean`` make of them, as the kernels for quantized tensors did.
``torch.export.export`` of a converted model is the q-dq graph that ``convert_pt2e`` would make.

Custom modules (``prepare_custom_config_dict``, by default LSTM and MultiheadAttention) are those of
``prepare_fx``.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

from torchq_compat.annotate.annotation import annotating_nothing
from torchq_compat.capture.opaque_calls import OpaqueModule
from torchq_compat.eager import observe
from torchq_compat.eager.convert import ConvertSettings, convert_children, convert_module, tell_of_observers
from torchq_compat.eager.grid import rounding_as_graph
from torchq_compat.eager.users_model import ConvertedEager, EagerModel, decide, mark
from torchq_compat.errors import ConfigError
from torchq_compat.lower.integers.lowered_module import lower_to_integers
from torchq_compat.model.graph_module import ConvertedGraphModule, ConvertedModel, record_of
from torchq_compat.model.other_tools import refuse_tools
from torchq_compat.quantize.distributed.ranks import meet_other_ranks
from torchq_compat.quantize.distributed.wrappers import check_not_sharded, unwrapped
from torchq_compat.quantize_fx import convert_to_reference_fx, prepare_fx
from torchq_compat.read.custom_configs import CONVERT_KEYS, PREPARE_KEYS
from torchq_compat.support import argument_checks as checks
from torchq_compat.support import torch_ao
from torchq_compat.support.decisions import MODULE_DECISIONS
from torchq_compat.support.graph_nodes import copied_model
from torchq_compat.support.sharded import converting_together, make_whole
from torchq_compat.support.torch_ao import (
    DeQuantStub,
    FloatFunctional,
    QConfig,
    QuantStub,
    QuantWrapper,
    default_qconfig,
    get_default_qat_qconfig,
    get_default_qconfig,
)
from torchq_compat.support.torch_ao import fuse_modules as legacy_fuse_modules
from torchq_compat.support.torch_ao import fuse_modules_qat as legacy_fuse_modules_qat
from torchq_compat.support.user_warnings import silenced

__all__ = [
    "DeQuantStub",
    "FloatFunctional",
    "QConfig",
    "QuantStub",
    "QuantWrapper",
    "add_quant_dequant",
    "convert",
    "default_qconfig",
    "fuse_modules",
    "fuse_modules_qat",
    "get_default_qat_qconfig",
    "get_default_qconfig",
    "lower",
    "prepare",
    "prepare_qat",
    "propagate_qconfig_",
    "quantize",
    "quantize_qat",
    "swap_module",
]

MODULE = checks.instance_of(nn.Module, what="an nn.Module")
#: The settings of all configs in torch.ao; eager mode reads those of custom, non-traceable and fused modules.
SETTINGS = checks.one_of(*PREPARE_KEYS, CONVERT_KEYS[0], "additional_fuser_method_mapping")
CONFIG = checks.optional(checks.mapping_of(SETTINGS, checks.ANYTHING))
CLASS_MAPPING = checks.mapping_of(checks.instance_of(type, what="a class"), checks.ANYTHING)
MAPPING = checks.optional(CLASS_MAPPING)
ARGUMENTS = checks.sequence_of(checks.ANYTHING)
PATH = checks.instance_of(str, what="a path of a module")
PATHS = checks.either(checks.sequence_of(PATH), checks.sequence_of(checks.sequence_of(PATH)))
FUSING = {"model": MODULE, "modules_to_fuse": PATHS, "inplace": checks.FLAG, "fuser_func": checks.FUNCTION}
CLASSES = checks.optional(checks.names_of(checks.instance_of(type, what="a class of modules")))


@checks.checked_arguments(
    model=MODULE,
    inplace=checks.FLAG,
    allow_list=CLASSES,
    observer_non_leaf_module_list=CLASSES,
    prepare_custom_config_dict=CONFIG,
)
def prepare(
    model: nn.Module,
    inplace: bool = False,
    allow_list: Iterable[type] | None = None,
    observer_non_leaf_module_list: Iterable[type] | None = None,
    prepare_custom_config_dict: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Add observers to the modules of a float model that have a qconfig, their own or that of their parent.

    Legacy: ``torch.ao.quantization.prepare``. Observed is the result of each module that has a quantized
    class, of each fused module and ``FloatFunctional``, and the input of each ``QuantStub``.

    Args:
        model: the float model, with ``qconfig`` set on it or on its modules; None leaves a module float.
        inplace: whether to change ``model`` itself.
        allow_list: the types of modules without submodules to observe; default: torch.ao's.
        observer_non_leaf_module_list: the types of modules to observe though they have submodules.
        prepare_custom_config_dict: ``{"float_to_observed_custom_module_class": {nn.LSTM: ObservedLSTM}}``;
            default: torch.ao's quantizable LSTM and MultiheadAttention.

    Returns:
        The observed model.

    Raises:
        ConfigError: a qconfig is none, or an observer cannot be made; or ``prepare_fx`` prepared the model.
        CustomModuleError: an observed class does not do what the mapping requires of it.
        ArgumentError: an argument is of another type.

    Example:
        >>> import torch
        >>> from torchq_compat import quantize_eager
        >>> model = quantize_eager.QuantWrapper(torch.nn.Linear(4, 2)).eval()
        >>> model.qconfig = quantize_eager.get_default_qconfig("x86")
        >>> prepared = quantize_eager.prepare(model)
        >>> _ = prepared(torch.randn(50, 4))  # calibrate
        >>> type(prepared.module.activation_post_process).__name__
        'HistogramObserver'
    """
    config = _config(prepare_custom_config_dict)
    working = _working(model, "prepare", inplace=inplace)
    observe.set_qconfigs(working, {})
    settings = observe.ObserveSettings(
        torch_ao.get_default_qconfig_propagation_list() if allow_list is None else tuple(allow_list),
        tuple(observer_non_leaf_module_list or ()),
        config.get("float_to_observed_custom_module_class", {}),
    )
    decide(working, observe.observe(working, settings))
    mark(working, EagerModel)
    return working


@checks.checked_arguments(model=MODULE, mapping=MAPPING, inplace=checks.FLAG)
def prepare_qat(
    model: nn.Module, mapping: Mapping[type, Any] | None = None, inplace: bool = False
) -> nn.Module:
    """Replace the modules of a float model that have a qconfig by ones that train with rounded weights.

    Legacy: ``torch.ao.quantization.prepare_qat``.

    Args:
        model: the float model in training mode, with ``qconfig`` set; see ``prepare``.
        mapping: type of float module -> class with ``from_float``; default: torch.ao's modules for QAT.
        inplace: whether to change ``model`` itself.

    Returns:
        The model to train, with fake-quantizes.

    Raises:
        ConfigError: ``model`` is in evaluation mode; or as for ``prepare``.

    Example:
        >>> import torch
        >>> from torchq_compat import quantize_eager
        >>> model = quantize_eager.QuantWrapper(torch.nn.Linear(4, 2)).train()
        >>> model.qconfig = quantize_eager.get_default_qat_qconfig("x86")
        >>> prepared = quantize_eager.prepare_qat(model)
        >>> prepared(torch.randn(3, 4)).sum().backward()  # train it as any module
    """
    if not model.training:
        raise ConfigError.of("TQ905.evaluation_mode")
    classes = dict(torch_ao.get_default_qat_module_mappings() if mapping is None else mapping)
    # torch.ao's class refuses it; an attention module, which has it, is a custom module.
    classes.pop(nn.modules.linear.NonDynamicallyQuantizableLinear, None)
    working = _working(model, "prepare_qat", inplace=inplace)
    observe.set_qconfigs(working, {})
    convert_children(working, ConvertSettings(classes, {}))
    return prepare(working, inplace=True, observer_non_leaf_module_list=set(classes.values()))


@checks.checked_arguments(
    module=MODULE,
    mapping=MAPPING,
    inplace=checks.FLAG,
    remove_qconfig=checks.FLAG,
    is_reference=checks.FLAG,
    convert_custom_config_dict=CONFIG,
    use_precomputed_fake_quant=checks.FLAG,
)
def convert(
    module: nn.Module,
    mapping: Mapping[type, Any] | None = None,
    inplace: bool = False,
    remove_qconfig: bool = True,
    is_reference: bool = False,
    convert_custom_config_dict: Mapping[str, Any] | None = None,
    use_precomputed_fake_quant: bool = False,
) -> nn.Module:
    """Replace the observed modules of a calibrated or trained model by quantized ones, at their paths.

    Legacy: ``torch.ao.quantization.convert``. A model that torch.ao's ``prepare`` made converts too.

    Args:
        module: the observed model.
        mapping: type of float module -> quantized class; default: torch.ao's. A class of
            torch.ao.nn.quantized stands for the class here that computes the same; of any other
            ``from_float`` is called.
        inplace: whether to change ``module`` itself.
        remove_qconfig: whether to remove ``qconfig`` and the observers that are left.
        is_reference: has no effect: the modules always compute q-dq.
        convert_custom_config_dict: ``{"observed_to_quantized_custom_module_class": {Observed: Quantized}}``;
            default: torch.ao's.
        use_precomputed_fake_quant: whether trained weights keep the ranges of their fake-quantizes, which
            else observe them once more.

    Returns:
        The converted model: of the class of ``module``, with floats in and out.

    Raises:
        ConvertError: a module cannot be converted; the message has its path.
        CustomModuleError: a quantized class does not do what the mapping requires of it.
        ArgumentError: an argument is of another type.

    Warns:
        QuantizationWarning: TQ405, observers have seen no data; TQ424, no module has a qconfig; TQ425 and
            TQ426, at a call: values reach a quantized module, or are computed, in a way that eager mode
            refuses.

    Example:
        >>> import torch
        >>> from torchq_compat import quantize_eager
        >>> model = quantize_eager.QuantWrapper(torch.nn.Linear(4, 2)).eval()
        >>> model.qconfig = quantize_eager.get_default_qconfig("x86")
        >>> prepared = quantize_eager.prepare(model)
        >>> _ = prepared(torch.randn(50, 4))  # calibrate
        >>> quantize_eager.convert(prepared).module.weight().dtype
        torch.qint8
    """
    config = _config(convert_custom_config_dict)
    settings = ConvertSettings(
        torch_ao.get_default_static_quant_module_mappings() if mapping is None else mapping,
        config.get("observed_to_quantized_custom_module_class", {}),
        as_trained=use_precomputed_fake_quant,
    )
    module = unwrapped(module, "convert")
    meet_other_ranks(module, "convert")
    with converting_together(module) as parts:
        working = _working(module, "convert", inplace=inplace, known=parts)
        if not isinstance(working, ConvertedEager) and observe.tell_if_unasked(
            working, "convert", "quantized"
        ):
            return working
        tell_of_observers(working, settings)
        with silenced(lambda text: "must run observer" in text):  # Those without data are told of above.
            convert_children(working, settings)
        make_whole(working, "")
    if remove_qconfig:
        for item in working.modules():
            vars(item).pop("qconfig", None)
            observe.forget_observers(item)
    mark(working, ConvertedEager)
    decide(working, settings.decisions)
    return working


@checks.checked_arguments(converted=MODULE, example_inputs=ARGUMENTS)
def lower(converted: nn.Module, example_inputs: tuple[Any, ...]) -> ConvertedModel:
    """Return a converted model as one graph on integer kernels, as ``convert_fx`` returns.

    The model is captured with ``torch.export``, so its Python has to be one that FX mode takes; it stays as
    it is. Legacy: torch.ao's converted model ran integer kernels module by module.

    Args:
        converted: the model that ``convert`` returned.
        example_inputs: one example of every positional argument, as for ``prepare_fx``.

    Returns:
        The lowered model, with the bits of the captured graph; ``reference`` is that graph.

    Raises:
        ConfigError: ``converted`` was not returned by ``convert``, or has custom modules.
        InputError: ``example_inputs`` do not fit the model.
        CaptureError: torch.export cannot capture the model.
    """
    if not isinstance(converted, ConvertedEager):
        raise ConfigError.of("TQ905.not_converted", converted=converted)
    if any(isinstance(module, OpaqueModule) for module in converted.modules()):
        raise ConfigError.of("TQ905.lower_custom_modules")
    converted = copied_model(converted).eval()
    # What is left to the Quantizer is quantized already.
    with rounding_as_graph(), silenced(lambda text: text.endswith(("[TQ401]", "[TQ423]"))):
        prepared = prepare_fx(converted, annotating_nothing(), example_inputs)
        trial = None if (record := record_of(prepared)) is None else record.trial_inputs
        reference = convert_to_reference_fx(prepared).reference
    decisions = vars(converted)[MODULE_DECISIONS]
    known = ConvertedGraphModule.wrap(reference, replace(reference.record, decisions=decisions), {})
    return lower_to_integers(known, trial)


@checks.checked_arguments(
    model=MODULE, run_fn=checks.FUNCTION, run_args=ARGUMENTS, mapping=MAPPING, inplace=checks.FLAG
)
def quantize(
    model: nn.Module,
    run_fn: Callable[..., Any],
    run_args: Sequence[Any],
    mapping: Mapping[type, Any] | None = None,
    inplace: bool = False,
) -> nn.Module:
    """Prepare a float model, calibrate it and convert it.

    Legacy: ``torch.ao.quantization.quantize``.

    Args:
        model: the float model, with ``qconfig`` set.
        run_fn: called with the prepared model and ``run_args``.
        run_args: the other arguments of ``run_fn``.
        mapping: as for ``convert``.
        inplace: whether to change ``model`` itself.

    Returns:
        The converted model.
    """
    working = _working(model, "quantize", inplace=inplace).eval()
    prepare(working, inplace=True)
    run_fn(working, *run_args)
    return convert(working, mapping, inplace=True)


@checks.checked_arguments(model=MODULE, run_fn=checks.FUNCTION, run_args=ARGUMENTS, inplace=checks.FLAG)
def quantize_qat(
    model: nn.Module, run_fn: Callable[..., Any], run_args: Sequence[Any], inplace: bool = False
) -> nn.Module:
    """Prepare a float model for training, train it and convert it.

    Legacy: ``torch.ao.quantization.quantize_qat``.

    Args:
        model: the float model, with ``qconfig`` set.
        run_fn: called with the prepared model and ``run_args``; it trains.
        run_args: the other arguments of ``run_fn``.
        inplace: whether to change ``model`` itself.

    Returns:
        The converted model.
    """
    working = _working(model, "quantize_qat", inplace=inplace).train()
    prepare_qat(working, inplace=True)
    run_fn(working, *run_args)
    return convert(working, inplace=True)


@checks.checked_arguments(**FUSING, fuse_custom_config_dict=CONFIG)
def fuse_modules(
    model: nn.Module,
    modules_to_fuse: Sequence[Any],
    inplace: bool = False,
    fuser_func: Callable[..., Any] = torch_ao.fuse_known_modules,
    fuse_custom_config_dict: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Make one module of each chain of a convolution or linear module, a batch norm and a ReLU.

    Legacy: ``torch.ao.quantization.fuse_modules``. The fused module stands at the path of the first,
    identities at the others.

    Args:
        model: the float model, in evaluation mode if batch norms are to be folded.
        modules_to_fuse: the paths of one chain, or a list of chains.
        inplace: whether to change ``model`` itself.
        fuser_func: (modules, is_qat, mapping) -> the modules to put in their places.
        fuse_custom_config_dict: ``{"additional_fuser_method_mapping": {(A, B): function}}``.

    Returns:
        The model with fused modules.

    Raises:
        ConfigError: a path is not of the model, or there is no fused module for a chain.
    """
    return _fused(legacy_fuse_modules, model, modules_to_fuse, inplace, fuser_func, fuse_custom_config_dict)


@checks.checked_arguments(**FUSING, fuse_custom_config_dict=CONFIG)
def fuse_modules_qat(
    model: nn.Module,
    modules_to_fuse: Sequence[Any],
    inplace: bool = False,
    fuser_func: Callable[..., Any] = torch_ao.fuse_known_modules,
    fuse_custom_config_dict: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Make one module, which trains, of each chain; as ``fuse_modules``, with batch norms that are kept.

    Legacy: ``torch.ao.quantization.fuse_modules_qat``.

    Args:
        model: the float model, in training mode.
        modules_to_fuse: as for ``fuse_modules``.
        inplace: as for ``fuse_modules``.
        fuser_func: as for ``fuse_modules``.
        fuse_custom_config_dict: as for ``fuse_modules``.

    Returns:
        The model with fused modules.

    Raises:
        ConfigError: as for ``fuse_modules``.
    """
    return _fused(
        legacy_fuse_modules_qat, model, modules_to_fuse, inplace, fuser_func, fuse_custom_config_dict
    )


@checks.checked_arguments(
    module=MODULE,
    qconfig_dict=checks.optional(checks.mapping_of(checks.ANYTHING, checks.ANYTHING)),
    prepare_custom_config_dict=CONFIG,
)
def propagate_qconfig_(
    module: nn.Module,
    qconfig_dict: Mapping[Any, Any] | None = None,
    prepare_custom_config_dict: Mapping[str, Any] | None = None,
) -> None:
    """Set ``qconfig`` of every module: its own, or else that of its type, its path or its parent.

    Legacy: ``torch.ao.quantization.propagate_qconfig_``.

    Args:
        module: the float model, changed.
        qconfig_dict: type or path -> QConfig or None.
        prepare_custom_config_dict: modules in its ``non_traceable_module_name`` and
            ``non_traceable_module_class`` get none.

    Raises:
        ConfigError: a qconfig is none.
    """
    config = prepare_custom_config_dict or {}
    left_out = (
        *config.get("non_traceable_module_name", ()),
        *config.get("non_traceable_module_class", ()),
    )
    observe.set_qconfigs(module, qconfig_dict or {}, left_out)


@checks.checked_arguments(module=MODULE)
def add_quant_dequant(module: nn.Module) -> nn.Module:
    """Wrap each module without submodules that has a qconfig in a ``QuantWrapper``, in place.

    Legacy: ``torch.ao.quantization.add_quant_dequant``.

    Args:
        module: the model, whose modules have a ``qconfig``; see ``propagate_qconfig_``.

    Returns:
        ``module``, or the wrapper of it if it has no submodules.
    """
    is_leaf = not any(name != "parametrizations" for name, _ in module.named_children())
    if is_leaf and getattr(module, "qconfig", None):
        wrapper: nn.Module = torch_ao.QuantWrapper(module)
        return wrapper
    for name, child in list(module.named_children()):
        module._modules[name] = add_quant_dequant(child)
    return module


@checks.checked_arguments(
    mod=MODULE,
    mapping=CLASS_MAPPING,
    custom_module_class_mapping=CLASS_MAPPING,
    use_precomputed_fake_quant=checks.FLAG,
)
def swap_module(
    mod: nn.Module,
    mapping: Mapping[type, Any],
    custom_module_class_mapping: Mapping[type, Any],
    use_precomputed_fake_quant: bool = False,
) -> nn.Module:
    """Return the quantized module of one observed module, or the module itself.

    Legacy: ``torch.ao.quantization.swap_module``.

    Args:
        mod: the observed module.
        mapping: as for ``convert``.
        custom_module_class_mapping: observed class -> quantized class.
        use_precomputed_fake_quant: as for ``convert``.

    Returns:
        What ``convert`` would put at its place.

    Raises:
        ConvertError: the module cannot be converted.
    """
    settings = ConvertSettings(mapping, custom_module_class_mapping, as_trained=use_precomputed_fake_quant)
    return convert_module(mod, settings, type_before_parametrizations(mod).__name__)


def _config(given: Mapping[str, Any] | None) -> Mapping[str, Any]:
    default: Mapping[str, Any] = torch_ao.get_default_custom_config_dict()  # type: ignore[no-untyped-call]
    return default if given is None else given


def lower_to_script(converted: nn.Module, inputs: tuple[Any, ...]) -> nn.Module:
    """Return ``converted`` as ``torch.jit.script`` takes it."""
    scripted: nn.Module = lower(converted, inputs).__prepare_scriptable__()
    return scripted


def _working(
    model: nn.Module, function: str, *, inplace: bool, known: Mapping[int, Any] | None = None
) -> nn.Module:
    """Return the model to change; if it is a copy, with what is ``known`` instead of copies of that.

    Raises:
        ConfigError: ``model`` is no model of eager mode, or sharded and to be converted in place.
        InputError: ``model``, which is to be prepared, is sharded.
    """
    if record_of(model) is not None:
        raise ConfigError.of("TQ905.of_prepare_fx", function=function)
    if function != "convert" and isinstance(model, ConvertedEager):
        refuse_tools(sys._getframe(1))
        raise ConfigError.of("TQ905.converted_already", function=function)
    if function != "convert":
        check_not_sharded(model)
    elif inplace and known:
        raise ConfigError.of("TQ905.sharded_in_place")
    return model if inplace else copied_model(model, known)


def _fused(
    fuse: Callable[..., nn.Module], model: nn.Module, chains: Any, inplace: bool, *others: Any
) -> nn.Module:
    try:
        return fuse(model, chains, inplace, *others)
    except (AttributeError, NotImplementedError, AssertionError, TypeError, IndexError) as cause:
        raise ConfigError.of("TQ905.fuse", cause=cause) from cause
