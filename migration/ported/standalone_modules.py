"""Quantize a model around a standalone block that takes and returns quantized tensors.

The block is prepared on its own, with its own configuration; between it and its neighbours no value goes back
to float.

    python standalone_modules.py
"""

import torch
from torch import nn
from torch.ao.quantization import default_qconfig, QConfigMapping
from torchq_compat.quantize_fx import convert_fx, prepare_fx
from torchq_compat.custom_config import PrepareCustomConfig


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 16)
        self.relu = nn.ReLU()

    def forward(self, x):
        return self.relu(self.fc(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.block = Block()
        self.last = nn.Linear(16, 4)

    def forward(self, x):
        return self.last(self.block(self.first(x)))


def quantize(model, batches):
    prepare_custom_config_dict = PrepareCustomConfig().set_standalone_module_name("block", QConfigMapping().set_global(default_qconfig), (torch.randn(4, 16),), (
                    PrepareCustomConfig()
                    .set_input_quantized_indexes([0])
                    .set_output_quantized_indexes([0])
                ), None)
    prepared = prepare_fx(
        model, QConfigMapping().set_global(default_qconfig), (batches[0],), prepare_custom_config=prepare_custom_config_dict
    )
    with torch.no_grad():
        for batch in batches:
            prepared(batch)
    return convert_fx(prepared)


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
