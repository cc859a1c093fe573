"""Quantize the LSTM and the linear of a word language model with the eager function, and save the state.

python quantize_dynamic_lm.py
"""

import os
import tempfile

import torch
import torch.nn as nn
import torch.quantization

WORDS, HIDDEN = 60, 32


class LSTMModel(nn.Module):
    def __init__(self, layers=2, dropout=0.5):
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(WORDS, HIDDEN)
        self.rnn = nn.LSTM(HIDDEN, HIDDEN, layers, dropout=dropout)
        self.decoder = nn.Linear(HIDDEN, WORDS)
        self.layers = layers

    def forward(self, tokens, hidden):
        emb = self.drop(self.encoder(tokens))
        output, hidden = self.rnn(emb, hidden)
        return self.decoder(self.drop(output)), hidden

    def init_hidden(self, batch):
        weight = next(self.parameters())
        return (weight.new_zeros(self.layers, batch, HIDDEN), weight.new_zeros(self.layers, batch, HIDDEN))


def print_size_of_model(model):
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "temp.p")
        torch.save(model.state_dict(), path)
        print("Size (MB):", os.path.getsize(path) / 1e6)


def report(name, output):
    print(name, *(f"{value:.6f}" for value in output.flatten().tolist()))


def main():
    torch.manual_seed(0)
    model = LSTMModel().eval()
    tokens = torch.randint(WORDS, (7, 2))
    quantized_model = torch.quantization.quantize_dynamic(model, {nn.LSTM, nn.Linear}, dtype=torch.qint8)
    print_size_of_model(model)
    print_size_of_model(quantized_model)
    with torch.no_grad():
        report("float", model(tokens, model.init_hidden(2))[0])
        report("quantized", quantized_model(tokens, quantized_model.init_hidden(2))[0])


if __name__ == "__main__":
    main()
