"""Eager mode: stubs, fused modules, a residual added by FloatFunctional; calibrated, and trained.

python eager_static.py
"""

import copy

import torch
import torch.nn as nn
from torch.ao import quantization as tq
from torch.ao.nn.quantized import FloatFunctional
from torch.ao.quantization import DeQuantStub, QuantStub
import torchq_compat.quantize_eager


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU()
        self.skip_add = FloatFunctional()

    def forward(self, x):
        return self.skip_add.add(x, self.relu(self.bn(self.conv(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.stem = nn.Conv2d(3, 8, 3, stride=2)
        self.block = Block(8)
        self.fc = nn.Linear(8, 5)
        self.head = nn.Linear(5, 2)
        self.head.qconfig = None  # stays float

    def forward(self, x):
        x = self.block(self.stem(self.quant(x)))
        return self.head(self.dequant(self.fc(x.mean([2, 3]))))

    def fuse_model(self, is_qat):
        fuse = torchq_compat.quantize_eager.fuse_modules_qat if is_qat else torchq_compat.quantize_eager.fuse_modules
        fuse(self.block, ["conv", "bn", "relu"], inplace=True)


def report(name, output):
    print(name, *(f"{value:.6f}" for value in output.flatten().tolist()))


def main():
    torch.manual_seed(0)
    torch.backends.quantized.engine = "fbgemm"
    images = torch.randn(16, 3, 17, 17)
    float_model = Net()
    float_model(images)  # gives the batch norm statistics

    model = copy.deepcopy(float_model).eval()
    model.fuse_model(is_qat=False)
    model.qconfig = tq.get_default_qconfig("fbgemm")
    torchq_compat.quantize_eager.prepare(model, inplace=True)
    model(images)
    torchq_compat.quantize_eager.convert(model, inplace=True)
    report("calibrated", model(images[:2]))

    trained = copy.deepcopy(float_model).train()
    trained.fuse_model(is_qat=True)
    trained.qconfig = tq.get_default_qat_qconfig("fbgemm")
    torchq_compat.quantize_eager.prepare_qat(trained, inplace=True)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.01)
    for _ in range(4):
        optimizer.zero_grad()
        trained(images).square().mean().backward()
        optimizer.step()
    trained.eval()
    quantized = torchq_compat.quantize_eager.convert(trained)
    report("float", trained(images[:2]))
    report("quantized", quantized(images[:2]))


if __name__ == "__main__":
    main()
