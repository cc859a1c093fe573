"""As scripts were written for torch 1.8 to 1.12."""

from __future__ import print_function

import copy
import torch
import torch.nn as nn
import torch.ao.quantization
from torch.ao.quantization import get_default_qconfig, default_dynamic_qconfig, QConfigMapping
from torchq_compat.quantize_fx import prepare_fx, convert_fx, fuse_fx, convert_to_reference_fx
from torchq_compat.custom_config import ConvertCustomConfig, PrepareCustomConfig


class Net(nn.Module):
    pass


qconfig = get_default_qconfig('fbgemm')
qconfig_dict = (
    QConfigMapping()
    .set_global(qconfig)  # everything
    .set_object_type(nn.LSTM, default_dynamic_qconfig)
    .set_module_name("head", None)  # stays float
)


def quantize(model, x, path):
    model = fuse_fx(copy.deepcopy(model).eval())
    prepare_custom_config_dict = (
        PrepareCustomConfig()
        .set_float_to_observed_mapping(nn.LSTM, torch.ao.nn.quantizable.LSTM)
        .set_preserved_attributes(["vocabulary"])
    )
    prepared = prepare_fx(
        model,
        qconfig_dict,
        example_inputs=(x,),
        prepare_custom_config=prepare_custom_config_dict,
    )
    with torch.no_grad():
        prepared(x)
    quantized = convert_fx(
        prepared, convert_custom_config=ConvertCustomConfig().set_preserved_attributes(["vocabulary"])
    )
    reference = convert_to_reference_fx(prepared)
    torch.jit.save(torch.jit.script(quantized), path)
    loaded = torch.jit.load(path)
    return reference, loaded
