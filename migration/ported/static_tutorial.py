"""Quantize an image classifier after training: calibrate on a loader, compare sizes, look at the layers.

The example inputs are the images of the first batch, with no tuple around them.

    python static_tutorial.py
"""

import copy
import os
import tempfile

import torch
import torch.nn as nn
from torch.ao.quantization import get_default_qconfig, QConfigMapping
from torchq_compat.quantize_fx import convert_fx, fuse_fx, prepare_fx
from torch.utils.data import DataLoader, TensorDataset


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, stride=2, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(16, 5)

    def forward(self, x):
        x = self.relu(self.bn1(self.conv1(x)))
        x = torch.relu(self.conv2(x))
        x = self.avgpool(x)
        x = x.view(x.size(0), -1)
        return self.fc(x)


def print_size_of_model(model, label):
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "temp.p")
        torch.save(model.state_dict(), path)
        print(label, "size (MB):", os.path.getsize(path) / 1e6)


def calibrate(model, data_loader):
    model.eval()
    with torch.no_grad():
        for image, _ in data_loader:
            model(image)


def report(name, output):
    print(name, *(f"{value:.6f}" for value in output.flatten().tolist()))


def main():
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(32, 3, 17, 17), torch.randint(5, (32,)))
    data_loader = DataLoader(dataset, batch_size=8)
    more = torch.randn(5, 3, 17, 17)
    float_model = Classifier().eval()
    model_to_quantize = copy.deepcopy(float_model)

    qconfig = get_default_qconfig("x86")
    qconfig_dict = QConfigMapping().set_global(qconfig)
    example_inputs = next(iter(data_loader))[0]
    prepared_model = prepare_fx(model_to_quantize, qconfig_dict, (example_inputs,))
    calibrate(prepared_model, data_loader)
    quantized_model = convert_fx(prepared_model)

    print_size_of_model(float_model, "before")
    print_size_of_model(quantized_model, "after")
    fused_model = fuse_fx(copy.deepcopy(float_model))
    print("weights", quantized_model.conv1.weight().dtype, quantized_model.fc.weight().dtype)
    with torch.no_grad():
        assert torch.allclose(fused_model(more), float_model(more), atol=1e-5)
        report("float", float_model(more))
        report("quantized", quantized_model(more))


if __name__ == "__main__":
    main()
