"""Train with fake-quantizes that learn their scale, and print the scales.

python learnable_qat.py
"""

import torch
from torch import nn
from torch.ao.quantization import MinMaxObserver, QConfig, QConfigMapping
from torch.ao.quantization._learnable_fake_quantize import _LearnableFakeQuantize
from torchq_compat.quantize_fx import convert_fx, prepare_qat_fx

learnable = _LearnableFakeQuantize.with_args(
    observer=MinMaxObserver, quant_min=0, quant_max=255, dtype=torch.quint8, scale=0.05, zero_point=128.0
)
learnable_weight = _LearnableFakeQuantize.with_args(
    observer=MinMaxObserver,
    quant_min=-128,
    quant_max=127,
    dtype=torch.qint8,
    qscheme=torch.per_tensor_symmetric,
    scale=0.01,
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.relu = nn.ReLU()
        self.last = nn.Linear(16, 4)

    def forward(self, x):
        return self.last(self.relu(self.first(x)))


def fake_quantizes(model):
    return [module for module in model.modules() if isinstance(module, _LearnableFakeQuantize)]


def report(name, output):
    print(name, *(f"{value:.6f}" for value in output.flatten().tolist()))


def main():
    torch.manual_seed(0)
    model = Net().train()
    x, target = torch.randn(32, 8), torch.randn(32, 4)
    mapping = QConfigMapping().set_global(QConfig(activation=learnable, weight=learnable_weight))
    more = torch.randn(5, 8)
    with torch.no_grad():
        report("float", model(more))
    prepared = prepare_qat_fx(model, mapping, (x,))
    for fake_quantize in fake_quantizes(prepared):
        fake_quantize.enable_static_estimate()
    prepared(x)
    for fake_quantize in fake_quantizes(prepared):
        fake_quantize.enable_param_learning()
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.0001)
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(prepared(x), target)
        loss.backward()
        optimizer.step()
        print(f"loss {loss.item():.5f}")
    print(
        "scales", len(fake_quantizes(prepared)), all(f.scale.numel() == 1 for f in fake_quantizes(prepared))
    )
    prepared.eval()
    quantized = convert_fx(prepared, observer_qparams=True)
    with torch.no_grad():
        report("quantized", quantized(more))


if __name__ == "__main__":
    main()
