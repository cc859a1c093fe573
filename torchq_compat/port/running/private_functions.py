"""Private functions of FX that scripts call, with their signatures, on the functions of this package."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.fx import GraphModule

from torchq_compat import quantize_fx
from torchq_compat.quantize.first_call import at_once


def prepare_fx(
    model: nn.Module,
    qconfig_mapping: Any,
    is_qat: bool,
    example_inputs: tuple[Any, ...],
    prepare_custom_config: Any = None,
    _equalization_config: Any = None,
    backend_config: Any = None,
    is_standalone_module: bool = False,
) -> GraphModule:
    """Replace ``torch.ao.quantization.quantize_fx._prepare_fx``."""
    prepare = at_once(quantize_fx.prepare_qat_fx) if is_qat else at_once(quantize_fx.prepare_fx)
    prepared: GraphModule = prepare(
        model,
        qconfig_mapping,
        example_inputs,
        prepare_custom_config,
        _equalization_config=_equalization_config,
        backend_config=backend_config,
    )
    return prepared


def convert_fx(
    graph_module: GraphModule,
    is_reference: bool = False,
    convert_custom_config: Any = None,
    is_standalone_module: bool = False,
    _remove_qconfig: bool = True,
    qconfig_mapping: Any = None,
    backend_config: Any = None,
    is_decomposed: bool = False,
    keep_original_weights: bool = False,
    *,
    observer_qparams: bool = False,
) -> GraphModule:
    """Replace ``torch.ao.quantization.quantize_fx._convert_fx``."""
    arguments = [graph_module, convert_custom_config, _remove_qconfig, qconfig_mapping, backend_config]
    convert = at_once(quantize_fx.convert_to_reference_fx)
    if not is_reference and not is_decomposed:
        convert = at_once(quantize_fx.convert_fx)
        arguments.append(keep_original_weights)
    converted: GraphModule = convert(*arguments, observer_qparams=observer_qparams)
    return converted


def convert_to_reference_fx(
    graph_module: GraphModule, is_reference: bool = False, *args: Any, **kwargs: Any
) -> GraphModule:
    """Convert as ``convert_fx`` does, always to a reference model; for ``torchq-compat run --reference``."""
    return convert_fx(graph_module, True, *args, **kwargs)


def fuse_fx(
    model: nn.Module, is_qat: bool = False, fuse_custom_config: Any = None, backend_config: Any = None
) -> nn.Module:
    """Replace ``torch.ao.quantization.quantize_fx._fuse_fx``; ``prepare_qat_fx`` fuses by itself."""
    return model if is_qat else quantize_fx.fuse_fx(model, fuse_custom_config, backend_config)
