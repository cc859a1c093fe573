"""As scripts were written for torch 1.8 to 1.12."""

from __future__ import print_function

import copy
import torch
import torch.nn as nn
import torch.quantization
from torch.quantization import get_default_qconfig, default_dynamic_qconfig
from torch.quantization.quantize_fx import prepare_fx, convert_fx, fuse_fx


class Net(nn.Module):
    pass


qconfig = get_default_qconfig('fbgemm')
qconfig_dict = {
    "": qconfig,  # everything
    "object_type": [(nn.LSTM, default_dynamic_qconfig)],
    "module_name": [
        ("head", None),  # stays float
    ],
}


def quantize(model, x, path):
    model = fuse_fx(copy.deepcopy(model).eval())
    prepare_custom_config_dict = {
        "float_to_observed_custom_module_class": {
            "static": {nn.LSTM: torch.nn.quantizable.LSTM},
        },
        "preserved_attributes": ["vocabulary"],
    }
    prepared = prepare_fx(
        model,
        qconfig_dict,
        example_inputs=(x,),
        prepare_custom_config_dict=prepare_custom_config_dict,
    )
    with torch.no_grad():
        prepared(x)
    quantized = convert_fx(
        prepared, convert_custom_config_dict={"preserved_attributes": ["vocabulary"]}
    )
    reference = convert_fx(prepared, is_reference = True)
    torch.jit.save(torch.jit.script(quantized), path)
    loaded = torch.jit.load(path)
    return reference, loaded
