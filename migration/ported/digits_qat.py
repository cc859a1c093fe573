"""Classify handwritten digits row by row with a convolution and an LSTM, then quantize in two ways.

The digits are the 8x8 images that come with scikit-learn, so nothing is downloaded. FX graph mode, with the
LSTM through the custom module API: first post-training static quantization, then quantization-aware training,
which freezes the observers and the batch norm statistics for its last epochs. Prints the accuracy of each
model on held-out images.

    python digits_qat.py
    python digits_qat.py --epochs 2 --qat-epochs 2 --hidden 16      # a quick look
"""

import argparse
import copy

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.ao.quantization import (
    disable_observer,
    get_default_qat_qconfig_mapping,
    get_default_qconfig_mapping,
)
from torchq_compat.custom_config import ConvertCustomConfig, PrepareCustomConfig
from torchq_compat.quantize_fx import convert_fx, prepare_fx, prepare_qat_fx
from torch.ao.nn.intrinsic.qat import freeze_bn_stats
from tqdm import tqdm

CLASSES = 10
BRIGHTEST = 16.0
HELD_OUT_EVERY = 3
BACKEND = torch.backends.quantized.engine

PREPARE_CONFIG = PrepareCustomConfig().set_float_to_observed_mapping(
    torch.nn.LSTM, torch.ao.nn.quantizable.LSTM
)
CONVERT_CONFIG = ConvertCustomConfig().set_observed_to_quantized_mapping(
    torch.ao.nn.quantizable.LSTM, torch.ao.nn.quantized.LSTM
)


class RowReader(nn.Module):
    """Reads an image from top to bottom: every row of pixels is one time step."""

    def __init__(self, hidden_size, channels=16, columns=8):
        super().__init__()
        self.hidden_size = hidden_size
        self.conv = nn.Conv2d(1, channels, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU()
        self.lstm = nn.LSTM(channels * columns, hidden_size)
        self.head = nn.Linear(hidden_size, CLASSES)

    def forward(self, images):
        x = self.relu(self.bn(self.conv(images)))
        rows = x.permute(2, 0, 1, 3).flatten(2)
        # FX needs the state spelled out: its quantizable LSTM cannot go without.
        h = images.new_zeros(1, images.size(0), self.hidden_size)
        c = images.new_zeros(1, images.size(0), self.hidden_size)
        output, _ = self.lstm(rows, (h, c))
        return self.head(output[-1])


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=25, help="epochs of float training")
    parser.add_argument("--qat-epochs", type=int, default=8, help="epochs of quantization-aware training")
    parser.add_argument("--observer-epochs", type=int, default=5, help="QAT epochs that update observers")
    parser.add_argument("--bn-epochs", type=int, default=6, help="QAT epochs that update batch norm")
    parser.add_argument("--hidden", type=int, default=64, help="hidden size of the LSTM")
    parser.add_argument("--batch", type=int, default=32, help="images per step")
    parser.add_argument("--lr", type=float, default=6e-3, help="peak learning rate")
    parser.add_argument("--qat-lr", type=float, default=1e-3, help="peak learning rate of QAT")
    parser.add_argument("--calibration-batches", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def load_images():
    """Every third image is held out, the others train."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / BRIGHTEST
    labels = torch.tensor(digits.target)
    held_out = torch.arange(len(images)) % HELD_OUT_EVERY == 0
    return (images[~held_out], labels[~held_out]), (images[held_out], labels[held_out])


def train(model, data, args, epochs, lr, before_epoch=None):
    images, labels = data
    shuffle = torch.Generator().manual_seed(args.seed)
    steps_per_epoch = -(-len(images) // args.batch)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=epochs * steps_per_epoch)
    progress = tqdm(range(epochs), desc="train", unit="epoch")
    for epoch in progress:
        model.train()
        if before_epoch is not None:
            before_epoch(model, epoch)
        for batch in torch.randperm(len(images), generator=shuffle).split(args.batch):
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        progress.set_postfix_str(f"loss {loss.item():.4f}")


@torch.no_grad()
def calibrate(model, data, args):
    images, _ = data
    for batch in images.split(args.batch)[: args.calibration_batches]:
        model(batch)


def quantize_after_training(model, data, args):
    mapping = get_default_qconfig_mapping(BACKEND)
    example_inputs = (data[0][: args.batch],)
    # prepare_fx shares the parameters with the model it is given.
    model = copy.deepcopy(model).eval()
    prepared = prepare_fx(model, mapping, example_inputs, prepare_custom_config=PREPARE_CONFIG)
    calibrate(prepared, data, args)
    return convert_fx(prepared, convert_custom_config=CONVERT_CONFIG)


def quantize_while_training(model, data, args):
    mapping = get_default_qat_qconfig_mapping(BACKEND)
    example_inputs = (data[0][: args.batch],)
    model = copy.deepcopy(model).train()
    prepared = prepare_qat_fx(model, mapping, example_inputs, prepare_custom_config=PREPARE_CONFIG)

    def freeze(model, epoch):
        if epoch >= args.observer_epochs:
            model.apply(disable_observer)
        if epoch >= args.bn_epochs:
            model.apply(freeze_bn_stats)

    train(prepared, data, args, args.qat_epochs, args.qat_lr, before_epoch=freeze)
    return convert_fx(prepared.eval(), convert_custom_config=CONVERT_CONFIG, observer_qparams=True)


@torch.no_grad()
def report(name, model, data, args):
    images, labels = data
    predicted = torch.cat([model(batch).argmax(-1) for batch in images.split(args.batch)])
    accuracy = (predicted == labels).float().mean().item()
    print(f"{name:<5} {accuracy:.3f} accuracy")


def main():
    args = parse_args()
    torch.manual_seed(args.seed)
    train_data, held_out = load_images()
    print(f"{len(train_data[0])} images to train on, {len(held_out[0])} held out")

    model = RowReader(args.hidden)
    train(model, train_data, args, args.epochs, args.lr)
    report("float", model.eval(), held_out, args)
    report("ptq", quantize_after_training(model, train_data, args), held_out, args)
    report("qat", quantize_while_training(model, train_data, args), held_out, args)


if __name__ == "__main__":
    main()
