"""The cases to measure: models with their inputs, and their conversions, which several contenders share."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.ao.quantization.quantize_fx as fx
from torch import Tensor, nn
from torch.ao.quantization import get_default_qat_qconfig_mapping, get_default_qconfig_mapping
from torch.fx import GraphModule

import torchq_compat as tc
from tests.helpers.oracle import CONVERT_LSTM, MAP_LSTM, calibrate

__all__ = [
    "ENGINE",
    "FEEDFORWARD",
    "LOOPS",
    "QUICK_FEEDFORWARD",
    "QUICK_LOOPS",
    "QUICK_RECURRENT",
    "RECURRENT",
    "Case",
    "Recipe",
    "RecurrentModel",
    "random_inputs",
    "recurrent",
]

ENGINE = "x86"
CALIBRATION_BATCHES = 2


class Case:
    """A float model, its inputs and its conversions; each conversion is made on first use.

    Attributes:
        threads: for engines that need the number of threads when they are built.
        trains: whether the model is trained with fake-quantizes; ``expected`` is the float model's result
            all the same, so the steps are few and small.
    """

    threads = 1
    trains = False

    def __init__(
        self,
        name: str,
        model: nn.Module,
        make_inputs: Callable[[], tuple[Tensor, ...]],
        prepare_config: Any = MAP_LSTM,
    ) -> None:
        self.name = name
        self.prepare_config = prepare_config
        self.model = model.eval()
        self.batches = [make_inputs() for _ in range(CALIBRATION_BATCHES)]
        self.inputs = make_inputs()

    @cached_property
    def expected(self) -> Any:
        """The result of the float model."""
        return self.model(*self.inputs)

    @cached_property
    def prepared(self) -> GraphModule:
        if self.trains:
            return self._trained(tc.prepare_qat_fx)
        mapping = get_default_qconfig_mapping(ENGINE)
        prepared = tc.prepare_fx(self.model, mapping, self.batches[0], self.prepare_config)
        calibrate(prepared, self.batches)
        return prepared

    @torch.enable_grad()
    def _trained(self, prepare_qat: Callable[..., GraphModule]) -> GraphModule:
        model = copy.deepcopy(self.model).train()
        prepared = prepare_qat(model, get_default_qat_qconfig_mapping(ENGINE), self.batches[0])
        optimizer = torch.optim.SGD(prepared.parameters(), 1e-5)
        for _ in range(20):
            for batch in self.batches:
                optimizer.zero_grad()
                prepared(*batch).square().mean().backward()
                optimizer.step()
        return prepared.eval()

    @cached_property
    def reference(self) -> nn.Module:
        return tc.convert_to_reference_fx(self.prepared)

    @cached_property
    def lowered(self) -> nn.Module:
        return tc.convert_fx(self.prepared)

    def lowered_by_fx(self) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if self.trains:
                return fx.convert_fx(self._trained(fx.prepare_qat_fx))
            mapping = get_default_qconfig_mapping(ENGINE)
            prepared = fx.prepare_fx(copy.deepcopy(self.model), mapping, self.batches[0], MAP_LSTM)
            calibrate(prepared, self.batches)
            return fx.convert_fx(prepared, CONVERT_LSTM)


class TrainedCase(Case):
    """A case whose model is trained with fake-quantizes, from batch statistics of the same data."""

    trains = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.model.train()
        with torch.no_grad():
            for _ in range(30):
                for batch in self.batches:
                    self.model(*batch)
        self.model.eval()


@dataclass(frozen=True)
class Recipe:
    """A case to be made later: nothing is allocated before its turn. ``hidden`` is None
    without recurrence."""

    name: str
    make_seeded: Callable[[], Case] = field(repr=False)
    hidden: int | None = None

    def make(self) -> Case:
        torch.manual_seed(0)
        return self.make_seeded()


class RecurrentModel(nn.Module):
    """An LSTM or GRU and a head that reads its output. The states are arguments, as FX requires."""

    def __init__(self, lstm: nn.Module, head: nn.Module | None = None) -> None:
        super().__init__()
        self.lstm = lstm
        self.head = nn.Identity() if head is None else head

    def forward(self, x: Tensor, h: Tensor, c: Tensor | None = None) -> Tensor:
        output, _ = self.lstm(x, h if c is None else (h, c))
        result: Tensor = self.head(output)
        return result


def random_inputs(lstm: nn.RNNBase, length: int, batch: int) -> tuple[Tensor, ...]:
    """Return an input and zero states of a RecurrentModel."""
    rows = lstm.num_layers * (1 + lstm.bidirectional)
    count = 2 if isinstance(lstm, nn.LSTM) else 1
    states = (torch.zeros(rows, batch, lstm.hidden_size) for _ in range(count))
    return torch.randn(length, batch, lstm.input_size), *states


def recurrent(
    inputs: int,
    hidden: int,
    layers: int,
    length: int,
    batch: int,
    *,
    bidirectional: bool = False,
    kind: type[nn.RNNBase] = nn.LSTM,
) -> Recipe:
    """Return a case of an nn.LSTM, or of a module of another ``kind``, and nothing else."""
    sizes = f"({inputs}, {hidden}, {layers}, {length}, {batch})"

    def make() -> Case:
        lstm = kind(inputs, hidden, layers, bidirectional=bidirectional)
        # FX maps only the LSTM.
        config = MAP_LSTM if kind is nn.LSTM else tc.get_default_prepare_custom_config()
        return Case(name, RecurrentModel(lstm), lambda: random_inputs(lstm, length, batch), config)

    name = f"{sizes} bidirectional" if bidirectional else sizes
    name = name if kind is nn.LSTM else f"{kind.__name__} {name}"
    return Recipe(name, make, hidden)


def _feedforward(name: str, model: Callable[[], nn.Module], *shape: int, case: type[Case] = Case) -> Recipe:
    return Recipe(name, lambda: case(name, model(), lambda: (torch.randn(shape),)))


def _mlp(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(width, 2 * width),
        nn.ReLU(),
        nn.Linear(2 * width, 2 * width),
        nn.ReLU(),
        nn.Linear(2 * width, width),
    )


def _cnn(width: int) -> nn.Module:
    def block(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, stride, 1), nn.BatchNorm2d(outputs), nn.ReLU()]

    return nn.Sequential(
        *block(3, width, 1),
        *block(width, 2 * width, 2),
        *block(2 * width, 4 * width, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, 10),
    )


class Transformer(nn.Module):
    """One layer of an encoder, its attention written with linears and torch's fused product."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.first(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (q, k, v))
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.narrow(nn.functional.relu(self.wide(self.second(x))))


class CellLoop(nn.Module):
    """A Python loop around an LSTMCell, as in tutorials, and a head for every step."""

    def __init__(self, hidden: int, steps: int) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(8, hidden)
        self.head = nn.Linear(hidden, 1)
        self.steps = steps

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> Tensor:
        outputs = []
        for step in range(self.steps):
            h, c = self.cell(x[step], (h, c))
            outputs.append(self.head(h))
        return torch.stack(outputs)


class DecoderStep(nn.Module):
    """One step of a decoder that attends to an encoder's output."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.rnn = nn.GRU(hidden, hidden)
        self.head = nn.Linear(2 * hidden, 40)

    def forward(self, x: Tensor, h: Tensor, encoded: Tensor) -> Tensor:
        output, _ = self.rnn(x, h)
        weights = torch.softmax(torch.matmul(output.transpose(0, 1), encoded.permute(1, 2, 0)), -1)
        context = torch.matmul(weights, encoded.transpose(0, 1)).transpose(0, 1)
        result: Tensor = self.head(torch.cat([output, context], -1))
        return result


class Seq2Seq(nn.Module):
    """An encoder, and a cell that is fed its own previous result."""

    def __init__(self, width: int, hidden: int, steps: int) -> None:
        super().__init__()
        self.encoder = nn.LSTM(width, hidden)
        self.decoder = nn.LSTMCell(width, hidden)
        self.head = nn.Linear(hidden, width)
        self.steps = steps

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> Tensor:
        _, (hidden, cell) = self.encoder(x, (h, c))
        h, c = hidden[0], cell[0]
        fed = x[-1]
        outputs = []
        for _ in range(self.steps):
            h, c = self.decoder(fed, (h, c))
            fed = self.head(h)
            outputs.append(fed)
        return torch.stack(outputs)


def _loop(name: str, model: Callable[[], nn.Module], *shapes: tuple[int, ...]) -> Recipe:
    def make() -> Case:
        # Only our own configuration maps cells: FX has no static ones.
        config = tc.get_default_prepare_custom_config()
        return Case(name, model(), lambda: tuple(torch.randn(shape) for shape in shapes), config)

    return Recipe(name, make)


#: (input, hidden, layers, T, batch)
RECURRENT: tuple[Recipe, ...] = (
    recurrent(64, 64, 1, 128, 4),
    recurrent(256, 512, 2, 128, 1),
    recurrent(256, 512, 2, 128, 16),
    recurrent(512, 1024, 1, 64, 8),
    recurrent(512, 512, 2, 1024, 1),
    recurrent(256, 512, 2, 128, 4, bidirectional=True),
    recurrent(64, 64, 1, 1, 1),
    recurrent(128, 128, 2, 1, 1),
    recurrent(256, 512, 2, 1, 1),
    recurrent(512, 1024, 1, 1, 1),
    recurrent(512, 512, 2, 10, 1),
    recurrent(256, 512, 2, 128, 1, kind=nn.GRU),
    recurrent(256, 512, 2, 1, 1, kind=nn.GRU),
)
FEEDFORWARD: tuple[Recipe, ...] = (
    _feedforward("Linear 512-1024-1024-512, batch 32", lambda: _mlp(512), 32, 512),
    _feedforward("CNN 3-32-64-128, 64x64, batch 8", lambda: _cnn(32), 8, 3, 64, 64),
    _feedforward("CNN 3-32-64-128, trained", lambda: _cnn(32), 8, 3, 64, 64, case=TrainedCase),
    _feedforward("transformer layer, 256 wide, 64 tokens, batch 8", lambda: Transformer(256, 4), 8, 64, 256),
)
#: Small calls in Python: at most 1.2 times float's time is expected.
LOOPS: tuple[Recipe, ...] = (
    _loop("LSTMCell, 20 steps, hidden 51", lambda: CellLoop(51, 20), (20, 1, 8), (1, 51), (1, 51)),
    _loop("decoder step, hidden 32", lambda: DecoderStep(32), (1, 1, 32), (1, 1, 32), (10, 1, 32)),
    _loop("seq2seq, 6 steps, hidden 32", lambda: Seq2Seq(16, 32, 6), (6, 1, 16), (1, 1, 32), (1, 1, 32)),
)
QUICK_LOOPS: tuple[Recipe, ...] = (
    _loop("LSTMCell, 2 steps, hidden 8", lambda: CellLoop(8, 2), (2, 32, 8), (32, 8), (32, 8)),
)
QUICK_RECURRENT: tuple[Recipe, ...] = (recurrent(8, 8, 1, 4, 2),)
QUICK_FEEDFORWARD: tuple[Recipe, ...] = (
    _feedforward("Linear 16-32-32-16, batch 4", lambda: _mlp(16), 4, 16),
)
