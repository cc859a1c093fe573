import importlib

import torch
import torch.ao.ns._numeric_suite_fx as ns
from torch.ao.quantization.quantize_fx import *
from torch.ao.quantization.fx.graph_module import ObservedGraphModule

fx = importlib.import_module("torch.ao.quantization.quantize_fx")


def old(model, qconfig, extra):
    qconfig_dict = {"": qconfig}
    qconfig_dict.update(extra)
    prepared = prepare_fx(model, qconfig_dict, {"preserved_attributes": ["a"]})
    equalized = prepare_fx(model, qconfig_dict, (1,), _equalization_config=extra)
    qat = prepare_qat_fx(model, {"object_type": extra})
    quantized = convert_fx(prepared)
    torch.save(quantized, "quantized.pt")
    torch.save(quantized.state_dict(), "state.pt")
    scripted = torch.jit.script(quantized)
    print(scripted.graph)
    return torch.jit.load("elsewhere.pt"), isinstance(prepared, ObservedGraphModule)


SHAPE = [1, 3, 224, -1.0]


def without_tensors(model, qconfig_mapping, loader, x):
    digits = (0, 7, 9, 2, 2)
    example_inputs = digits
    prepare_fx(model, qconfig_mapping, example_inputs)
    prepare_fx(model, qconfig_mapping, SHAPE)
    prepare_fx(model, qconfig_mapping, x.size())
    prepare_fx(model, qconfig_mapping, (x.shape, "NCHW"))
    prepare_fx(model, qconfig_mapping, ())
    batch = next(iter(loader))
    prepare_qat_fx(model, qconfig_mapping, batch)
    nothing = None
    return prepare_fx(model, qconfig_mapping, nothing)
