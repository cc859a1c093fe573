"""Quantize a small residual CNN after training statistics are known, save it and load it again.

python cnn_torchscript.py
"""

import os
import tempfile

import torch
import torchq_compat.quantize_fx as quantize_fx
from torch import nn
from torch.ao.quantization import get_default_qconfig, QConfigMapping


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(y)) + x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU())
        self.blocks = nn.Sequential(Block(8), Block(8))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(8, 5)

    def forward(self, images):
        x = self.pool(self.blocks(self.stem(images)))
        return self.head(torch.flatten(x, 1))


def see_statistics(model, images):
    """What training would do to the batch norms."""
    model.train()
    with torch.no_grad():
        for batch in images:
            model(batch)
    return model.eval()


def quantize_and_save(model, images, path):
    example = images[0]
    qconfig_dict = QConfigMapping().set_global(get_default_qconfig(torch.backends.quantized.engine))
    model = quantize_fx.prepare_fx(model, qconfig_dict, (example,))
    with torch.no_grad():
        for batch in images:
            model(batch)
    model = quantize_fx.convert_fx(model)
    torch.jit.save(torch.jit.script(model), path)


def report(name, output):
    print(name, *(f"{value:.6f}" for value in output.flatten().tolist()))


def main():
    torch.manual_seed(0)
    images = [torch.randn(4, 3, 17, 17) for _ in range(8)]
    more = torch.randn(16, 3, 17, 17)
    model = see_statistics(Net(), images)
    with torch.no_grad():
        report("float", model(more))
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "net.pt")
        quantize_and_save(model, images, path)
        loaded = torch.jit.load(path)
    with torch.no_grad():
        report("quantized", loaded(more))


if __name__ == "__main__":
    main()
