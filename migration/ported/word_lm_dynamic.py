"""Quantize a word language model dynamically: int8 weights, activations quantized as they come.

python word_lm_dynamic.py
"""

import torch
from torch import nn
from torch.ao.quantization import default_dynamic_qconfig, QConfigMapping
from torchq_compat.quantize_fx import convert_fx, prepare_fx

WORDS, HIDDEN = 50, 32

qconfig_dict = (
    QConfigMapping()
    .set_object_type(nn.LSTM, default_dynamic_qconfig)
    .set_object_type(nn.Linear, default_dynamic_qconfig)
)


class WordLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Embedding(WORDS, HIDDEN)
        self.rnn = nn.LSTM(HIDDEN, HIDDEN, num_layers=2)
        self.decoder = nn.Linear(HIDDEN, WORDS)

    def forward(self, tokens, h, c):
        output, _ = self.rnn(self.encoder(tokens), (h, c))
        return self.decoder(output)


def report(name, output):
    print(name, *(f"{value:.6f}" for value in output.flatten().tolist()))


def main():
    torch.manual_seed(0)
    model = WordLM().eval()
    state = torch.zeros(2, 3, HIDDEN)
    inputs = (torch.randint(WORDS, (9, 3)), state, state)
    prepared = prepare_fx(model, qconfig_dict, example_inputs=inputs)
    quantized = convert_fx(prepared)
    with torch.no_grad():
        report("float", model(*inputs))
        report("quantized", quantized(*inputs))


if __name__ == "__main__":
    main()
