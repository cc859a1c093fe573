"""Nothing to do: names that look like legacy ones, and new code."""

import torch
from torchq_compat.pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer import ComposableQuantizer
from torchq_compat import quantize_dynamic
from torchq_compat.quantize_fx import convert_fx, prepare_fx

quantizer = "torch.ao.quantization.quantizer"


def quantize(model, mapping, example_inputs, x):
    a = prepare_fx(model, mapping, example_inputs)
    b = prepare_fx(model, mapping, (x,))
    c = prepare_fx(model, mapping, tuple(x))
    quantized = convert_fx(a)
    torch.save({"model": quantized.state_dict()}, "state.pt")
    torch.jit.save(torch.jit.script(quantized), "model.pt")
    torch.onnx.export(model, (x,), "float.onnx")
    return quantize_dynamic(model), b, c
