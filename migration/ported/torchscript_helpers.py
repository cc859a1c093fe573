"""Quantize, script, save and load a model through helpers, as evaluation code does it; one more is traced.

python torchscript_helpers.py
"""

import os
import tempfile

import torch
from torch import nn
from torch.ao.quantization import QConfigMapping, get_default_qconfig
from torchq_compat.quantize_fx import convert_fx, prepare_fx


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = self.features(x)
        return self.head(x.mean([2, 3]))


def save_torchscript(model, folder, filename):
    path = os.path.join(folder, filename)
    torch.jit.save(torch.jit.script(model), path)
    return path


def load_torchscript(path, device):
    model = torch.jit.load(path, map_location=device)
    model.eval()
    return model


def evaluate(model, images):
    model.eval()
    with torch.no_grad():
        return torch.cat([model(image[None]) for image in images])


def report(name, output):
    print(name, *(f"{value:.6f}" for value in output.flatten().tolist()))


def main():
    torch.manual_seed(0)
    model = Net().eval()
    images = torch.randn(6, 3, 12, 12)
    example = torch.randn(1, 3, 12, 12)
    mapping = QConfigMapping().set_global(get_default_qconfig("x86"))
    prepared = prepare_fx(model, mapping, (example,))
    for _ in range(4):
        prepared(torch.randn(8, 3, 12, 12))
    quantized = convert_fx(prepared)
    with tempfile.TemporaryDirectory() as folder:
        path = save_torchscript(quantized, folder, "net.pth")
        loaded = load_torchscript(path, torch.device("cpu"))
        traced = torch.jit.trace(quantized, images)
        traced.save(os.path.join(folder, "traced.pt"))
        again = torch.jit.load(os.path.join(folder, "traced.pt"))
    report("float", evaluate(model, images))
    report("quantized", evaluate(loaded, images))
    with torch.no_grad():
        assert torch.allclose(again(images[:2]), loaded(images[:2]))


if __name__ == "__main__":
    main()
