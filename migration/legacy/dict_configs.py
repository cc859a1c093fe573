"""Quantize a small LSTM tagger with the dict forms of every configuration, as scripts before torch 1.13 did.

The embedding is quantized weight-only, one layer stays float, and the vocabulary survives as an attribute.

    python dict_configs.py
"""

import copy

import torch
import torch.nn as nn
import torch.quantization
from torch.quantization import default_qconfig, float_qparams_weight_only_qconfig
from torch.quantization.quantize_fx import convert_fx, fuse_fx, prepare_fx

WORDS = ["<unk>", "the", "cat", "sat", "on", "mat", "dog", "ran"]

qconfig_dict = {
    "": default_qconfig,  # everything else
    "object_type": [
        (nn.Embedding, float_qparams_weight_only_qconfig),
    ],
    "module_name": [
        ("score", None),  # the last layer stays float
    ],
}


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.vocabulary = WORDS
        self.embedding = nn.Embedding(len(WORDS), 16)
        self.lstm = nn.LSTM(16, 24)
        self.hidden = nn.Linear(24, 16)
        self.relu = nn.ReLU()
        self.score = nn.Linear(16, 4)

    def forward(self, tokens, h, c):
        x, _ = self.lstm(self.embedding(tokens), (h, c))
        return self.score(self.relu(self.hidden(x)))


def quantize(model, batches):
    prepare_custom_config_dict = {
        "float_to_observed_custom_module_class": {"static": {nn.LSTM: torch.nn.quantizable.LSTM}},
        "preserved_attributes": ["vocabulary"],
    }
    convert_custom_config_dict = {
        "observed_to_quantized_custom_module_class": {
            "static": {torch.nn.quantizable.LSTM: torch.nn.quantized.LSTM}
        },
        "preserved_attributes": ["vocabulary"],
    }
    model = fuse_fx(copy.deepcopy(model), {"preserved_attributes": ["vocabulary"]})
    prepared = prepare_fx(model, qconfig_dict, batches[0], prepare_custom_config_dict)
    with torch.no_grad():
        for batch in batches:
            prepared(*batch)
    return convert_fx(prepared, convert_custom_config_dict)


def report(name, output):
    print(name, *(f"{value:.6f}" for value in output.flatten().tolist()))


def main():
    torch.manual_seed(0)
    model = Tagger().eval()
    state = torch.zeros(1, 4, 24)
    batches = [(torch.randint(len(WORDS), (12, 4)), state, state) for _ in range(8)]
    quantized = quantize(model, batches)
    assert quantized.vocabulary == WORDS
    with torch.no_grad():
        report("float", model(*batches[-1]))
        report("quantized", quantized(*batches[-1]))


if __name__ == "__main__":
    main()
