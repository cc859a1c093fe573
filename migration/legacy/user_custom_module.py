"""Quantize a model with a module of the user's own, which brings its own observed and quantized class.

python user_custom_module.py
"""

import torch
from torch import nn
from torch.ao.quantization import default_observer, default_qconfig
from torch.ao.quantization.fx.custom_config import ConvertCustomConfig, PrepareCustomConfig
from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx


class Scale(nn.Module):
    """Multiplies every channel by a learned factor."""

    def __init__(self, channels):
        super().__init__()
        self.factor = nn.Parameter(torch.linspace(0.5, 1.5, channels))

    def forward(self, x):
        return x * self.factor


class ObservedScale(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor
        self.observer = default_observer()

    def forward(self, x):
        return self.observer(x * self.factor)

    @classmethod
    def from_float(cls, scale):
        observed = cls(scale.factor)
        observed.qconfig = scale.qconfig
        return observed


class QuantizedScale(nn.Module):
    def __init__(self, factor, scale, zero_point):
        super().__init__()
        self.factor, self.scale, self.zero_point = factor, scale, zero_point

    def forward(self, x):
        return torch.quantize_per_tensor(
            x.dequantize() * self.factor, self.scale, self.zero_point, torch.quint8
        )

    @classmethod
    def from_observed(cls, observed):
        scale, zero_point = observed.observer.calculate_qparams()
        return cls(observed.factor.detach(), float(scale), int(zero_point))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.scale = Scale(16)
        self.last = nn.Linear(16, 4)

    def forward(self, x):
        return self.last(self.scale(self.first(x)))


def quantize(model, batches):
    prepared = prepare_fx(
        model,
        {"": default_qconfig},
        (batches[0],),
        PrepareCustomConfig().set_float_to_observed_mapping(Scale, ObservedScale),
    )
    with torch.no_grad():
        for batch in batches:
            prepared(batch)
    return convert_fx(
        prepared, ConvertCustomConfig().set_observed_to_quantized_mapping(ObservedScale, QuantizedScale)
    )


def report(name, output):
    print(name, *(f"{value:.6f}" for value in output.flatten().tolist()))


def main():
    torch.manual_seed(0)
    model = Net().eval()
    batches = [torch.randn(32, 8) for _ in range(8)]
    more = torch.randn(16, 8)
    with torch.no_grad():
        report("float", model(more))
        report("quantized", quantize(model, batches)(more))


if __name__ == "__main__":
    main()
