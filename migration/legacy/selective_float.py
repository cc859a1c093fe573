"""Find the layers that quantization hurts most, leave them float, and quantize the rest.

python selective_float.py
"""

import copy

import torch
from torch import nn
from torch.ao.quantization import QConfigMapping, get_default_qconfig
from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 16)
        self.third = nn.Linear(16, 4)

    def forward(self, x):
        x = torch.relu(self.first(x))
        x = torch.relu(self.second(x))
        return self.third(x)


def quantize(model, batches, left_float):
    mapping = QConfigMapping().set_global(get_default_qconfig("x86"))
    for name in left_float:
        mapping.set_module_name(name, None)
    prepared = prepare_fx(copy.deepcopy(model), mapping, (batches[0],))
    with torch.no_grad():
        for batch in batches:
            prepared(batch)
    return convert_fx(prepared)


def error(model, quantized, batches):
    with torch.no_grad():
        return sum(float((model(batch) - quantized(batch)).abs().mean()) for batch in batches)


def report(name, output):
    print(name, *(f"{value:.6f}" for value in output.flatten().tolist()))


def main():
    torch.manual_seed(0)
    model = Net().eval()
    batches = [torch.randn(16, 8) for _ in range(4)]
    more = torch.randn(6, 8)
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    errors = {name: error(model, quantize(model, batches, [name]), batches) for name in names}
    best = min(errors, key=errors.get)
    print("left float:", best)
    quantized = quantize(model, batches, [best])
    with torch.no_grad():
        report("float", model(more))
        report("quantized", quantized(more))


if __name__ == "__main__":
    main()
