"""Eager mode, imported in several ways; stubs and QConfigs stay."""

import torch
import torch.ao.nn.quantized as nnq
import torch.quantization as tq
from torch.ao.quantization import DeQuantStub, QuantStub, get_default_qconfig
from torchq_compat.quantize_eager import fuse_modules, prepare
from torchq_compat.quantize_eager import add_quant_dequant, convert as finish
import torchq_compat.quantize_eager


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.conv, self.relu = torch.nn.Conv2d(3, 3, 1), torch.nn.ReLU()
        self.add = nnq.FloatFunctional()

    def forward(self, x):
        x = self.quant(x)
        return self.dequant(self.add.add(x, self.relu(self.conv(x))))


model = fuse_modules(Net().eval(), [["conv", "relu"]])
model.qconfig = get_default_qconfig("fbgemm")
prepared = prepare(model)
prepared(torch.randn(1, 3, 4, 4))
quantized = finish(prepared)
trained = torchq_compat.quantize_eager.prepare_qat(add_quant_dequant(model.train()))
torchq_compat.quantize_eager.quantize(model, lambda prepared: None, [])
nnq.Conv2d.from_float(prepared.conv)
torch.ops.quantized.add(prepared, prepared, 1.0, 0)
