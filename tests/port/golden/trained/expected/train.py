"""Quantization-aware training: FX converts with the qparams of the observers."""

import torch
from torch.ao.quantization import get_default_qat_qconfig_mapping
from torchq_compat import quantize_fx
from torchq_compat.quantize_fx import (
    convert_fx,
    convert_to_reference_fx,
    prepare_qat_fx,
)


def train(model, x, config, options):
    prepared = prepare_qat_fx(model, get_default_qat_qconfig_mapping("x86"), (x,))
    prepared(x).sum().backward()
    quantized = convert_fx(prepared.eval(), observer_qparams=True)
    again = quantize_fx.convert_fx(
        prepared,
        config,  # of the custom modules
        observer_qparams=True,
    )
    hanging = convert_fx(
        graph_module=prepared,
        observer_qparams=True
    )
    closed = convert_fx(
        prepared,
        config,
        observer_qparams=True,)
    reference = convert_to_reference_fx(prepared, config, observer_qparams=True,)
    flagged = convert_to_reference_fx(prepared, observer_qparams=True)
    starred = convert_fx(*options["args"], **options["kwargs"], observer_qparams=True)
    asked = convert_fx(prepared, observer_qparams=False)
    return quantized, again, hanging, closed, reference, flagged, starred, asked
