"""What scripts do before, between and after the calls."""

import torch
import torch.nn as nn
import torch.ao.quantization as tq
import torch.ao.quantization
from torch.ao.ns._numeric_suite import compare_weights
from torch.ao.quantization import default_dynamic_qconfig
from torchq_compat import quantize_dynamic
from torchao.quantization.pt2e.export_utils import WrapperModule
from torch.ao.quantization.quantize_fx import _fuse_fx, convert_fx, prepare_fx
from torchq_compat.pt2e import convert_pt2e, prepare_pt2e
import torchq_compat
from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
    XNNPACKQuantizer,
    get_symmetric_quantization_config,
)


def lstm(model):
    first = quantize_dynamic(model, {nn.LSTM, nn.Linear}, dtype=torch.qint8)
    second = torchq_compat.quantize_dynamic(model, {nn.LSTM: default_dynamic_qconfig})
    return first, second, torchq_compat.quantize_dynamic(model)


def static(model, mapping, loader, path):
    example = torch.randn(1, 3, 8, 8)
    batch = (next(iter(loader))[0])
    one = prepare_fx(model, mapping, (example,))
    two = prepare_fx(model, mapping, example_inputs=(batch,))
    three = prepare_fx(model, mapping, (example, example))
    four = prepare_fx(model, mapping, None)
    one_image = next(iter(loader))[0][:1].to("cpu")
    cropped = prepare_fx(model, mapping, (one_image,))
    five = prepare_fx(model, mapping, (torch.zeros(2, 3),))
    six = prepare_fx(model, mapping, batch_of_unknown_form(loader))
    quantized = convert_fx(one)
    torch.save({"model": quantized, "epoch": 3}, path)
    torch.save({"model": quantized.state_dict()}, path)
    torch.onnx.export(quantized, example, "model.onnx", dynamo=False)
    torch.onnx.export(quantized, (example,), "model.onnx")
    print(compare_weights(model.state_dict(), quantized.state_dict()))
    scripted = torch.jit.script(quantized)
    scripted.save(path)
    loaded = torch.jit.load(path)
    loaded.eval()
    return two, three, four, five, six, _fuse_fx(model), loaded
