"""Train a character-level LSTM language model on Python's own source code, then quantize it.

The text is the standard library of the Python that runs this script, so nothing is downloaded.
Post-training static quantization with FX graph mode: the LSTM goes through the custom module API,
the embedding keeps 8-bit weights only. Prints bits per character and model size before and after.

    python char_lm.py
    python char_lm.py --steps 30 --hidden 64      # a quick look
"""

import argparse
import io
import math
import sysconfig
from itertools import cycle, islice
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.ao.quantization import float_qparams_weight_only_qconfig, get_default_qconfig_mapping
from torchq_compat.custom_config import ConvertCustomConfig, PrepareCustomConfig
from torchq_compat.quantize_fx import convert_fx, prepare_fx
from tqdm import tqdm

ALPHABET = b"\n" + bytes(range(ord(" "), ord("~") + 1))
OUTSIDE_ALPHABET = bytes(set(range(256)) - set(ALPHABET))
CHAR_TO_TOKEN = bytes(max(ALPHABET.find(char), 0) for char in range(256))
HELD_OUT_EVERY = 10
# A cell state that counts without bound leaves eight bits too coarse for everything else in it.
CELL_STATE_PENALTY = 0.03


class CharLM(nn.Module):
    def __init__(self, hidden_size, num_layers, embedding_size=64, dropout=0.1):
        super().__init__()
        self.num_layers = num_layers
        self.hidden_size = hidden_size
        self.embedding = nn.Embedding(len(ALPHABET), embedding_size)
        self.lstm = nn.LSTM(embedding_size, hidden_size, num_layers)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(hidden_size, len(ALPHABET))

    def forward(self, tokens, h, c):
        x = self.embedding(tokens)
        x, (h, c) = self.lstm(x, (h, c))
        return self.head(self.dropout(x)), h, c


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400, help="training steps")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size of the LSTM")
    parser.add_argument("--layers", type=int, default=1, help="number of LSTM layers")
    parser.add_argument("--batch", type=int, default=16, help="sequences per step")
    parser.add_argument("--length", type=int, default=96, help="characters per sequence")
    parser.add_argument("--lr", type=float, default=6e-3, help="peak learning rate")
    parser.add_argument("--calibration-batches", type=int, default=16)
    parser.add_argument("--eval-chars", type=int, default=100_000, help="held-out characters scored")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def load_text():
    """Every tenth public top-level module of the standard library is held out, the others train."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in stdlib.glob("*.py") if not path.name.startswith("_"))
    held_out = files[::HELD_OUT_EVERY]
    train = [path for path in files if path not in held_out]
    return encode(train), encode(held_out)


def encode(files):
    text = b"".join(path.read_bytes() for path in files)
    tokens = bytearray(text.translate(CHAR_TO_TOKEN, delete=OUTSIDE_ALPHABET))
    return torch.frombuffer(tokens, dtype=torch.uint8).long()


def zero_state(args):
    shape = (args.layers, args.batch, args.hidden)
    return torch.zeros(shape), torch.zeros(shape)


def streams(tokens, args):
    """Cut the text into parallel streams and yield them piece by piece, in order."""
    columns = len(tokens) // args.batch
    tokens = tokens[: columns * args.batch].view(args.batch, columns).t().contiguous()
    for start in range(0, columns - 1, args.length):
        stop = min(start + args.length, columns - 1)
        yield tokens[start:stop], tokens[start + 1 : stop + 1]


def train(model, tokens, args):
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=args.lr, total_steps=args.steps, pct_start=0.1
    )
    model.train()
    h, c = zero_state(args)
    batches = islice(cycle(streams(tokens, args)), args.steps)
    progress = tqdm(batches, desc="train", total=args.steps, unit="step")
    for step, (inputs, targets) in enumerate(progress):
        logits, h, c = model(inputs, h.detach(), c.detach())
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        (loss + CELL_STATE_PENALTY * c.square().mean()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 10 == 0:
            progress.set_postfix_str(f"{loss.item() / math.log(2):.3f} bits/char")


@torch.no_grad()
def calibrate(model, tokens, args):
    h, c = zero_state(args)
    tokens = tokens[: args.calibration_batches * args.batch * args.length]
    for inputs, _ in streams(tokens, args):
        _, h, c = model(inputs, h, c)


@torch.no_grad()
def bits_per_char(model, tokens, args):
    """The state is carried through each stream, as it is when the model generates text."""
    h, c = zero_state(args)
    nats, chars = 0.0, 0
    for inputs, targets in streams(tokens[: args.eval_chars], args):
        logits, h, c = model(inputs, h, c)
        nats += F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").item()
        chars += targets.numel()
    return nats / chars / math.log(2)


def size_in_bytes(model):
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    return buffer.getbuffer().nbytes


def quantize(model, tokens, args):
    qconfig_mapping = get_default_qconfig_mapping(torch.backends.quantized.engine).set_object_type(
        nn.Embedding, float_qparams_weight_only_qconfig
    )
    prepare_config = PrepareCustomConfig().set_float_to_observed_mapping(
        nn.LSTM, torch.ao.nn.quantizable.LSTM
    )
    convert_config = ConvertCustomConfig().set_observed_to_quantized_mapping(
        torch.ao.nn.quantizable.LSTM, torch.ao.nn.quantized.LSTM
    )
    example_inputs = (tokens[: args.batch].unsqueeze(0), *zero_state(args))
    prepared = prepare_fx(model, qconfig_mapping, example_inputs, prepare_custom_config=prepare_config)
    calibrate(prepared, tokens, args)
    return convert_fx(prepared, convert_custom_config=convert_config)


def report(name, model, tokens, args):
    bits, size = bits_per_char(model, tokens, args), size_in_bytes(model)
    print(f"{name:<10} {bits:.4f} bits/char {size:>10} bytes")


def main():
    args = parse_args()
    torch.manual_seed(args.seed)
    train_tokens, held_out_tokens = load_text()
    print(f"{len(train_tokens)} characters to train on, {len(held_out_tokens)} held out")

    model = CharLM(args.hidden, args.layers)
    train(model, train_tokens, args)
    model.eval()
    report("float", model, held_out_tokens, args)
    report("quantized", quantize(model, train_tokens, args), held_out_tokens, args)


if __name__ == "__main__":
    main()
