"""Random recurrent contracts through the whole life: ``python -m tests.fuzz.recurrent_fuzzer [--count
1000]``.

Every contract ends near the float model on integers. None is refused: a dynamic nn.RNN, which FX's backend
lacks, stays float with a warning, and any error, even one of this package, is a fault.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
import traceback
import warnings
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.ao.quantization import (
    FakeQuantize,
    MinMaxObserver,
    QConfig,
    QConfigMapping,
    default_dynamic_qconfig,
    disable_observer,
    get_default_qat_qconfig_mapping,
    get_default_qconfig_mapping,
    per_channel_dynamic_qconfig,
)
from torch.nn.utils.rnn import pack_padded_sequence

import torchq_compat as tc
from tests.helpers.oracle import leaves, sqnr
from torchq_compat.errors import TorchQCompatError

#: The SQNR in dB that 8 bits everywhere leave of a random module in the worst case.
LEAST_DB, MOST_DB = 12.0, 75.0
#: SQNR in dB of the converted model against the fake-quantized model that was trained: a value midway between
#: two steps may fall to the other side.
LEAST_DB_TRAINED = 25.0
#: Fake-quantizes whose ranges cover all values seen.
FAKE_QUANTIZE: Any = FakeQuantize
COVERING_QAT = QConfig(  # type: ignore[no-untyped-call]
    FAKE_QUANTIZE.with_args(observer=MinMaxObserver, dtype=torch.quint8),
    FAKE_QUANTIZE.with_args(observer=MinMaxObserver, dtype=torch.qint8, qscheme=torch.per_tensor_symmetric),
)


class Contract(nn.Module):
    """A random recurrent module and how it is called."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__()
        self.inputs, hidden = dice.randint(1, 9), dice.randint(2, 20)
        self.dtype = dice.choice([torch.float32, torch.float32, torch.float64])
        self.is_cell = dice.random() < 0.25
        kind = dice.choice(["LSTM", "GRU", "RNN"])
        options: dict[str, Any] = {"bias": dice.random() < 0.8}
        if kind == "RNN":
            options["nonlinearity"] = dice.choice(["tanh", "relu"])
        self.batch_first = not self.is_cell and dice.random() < 0.5
        if not self.is_cell:
            options |= {
                "num_layers": dice.randint(1, 2),
                "bidirectional": dice.random() < 0.4,
                "batch_first": self.batch_first,
            }
            if kind == "LSTM" and dice.random() < 0.3:
                options["proj_size"] = dice.randint(1, hidden - 1)
        made = getattr(nn, kind + ("Cell" if self.is_cell else ""))
        self.rnn = made(self.inputs, hidden, **options)
        self.gives_state = dice.random() < 0.5
        self.is_unbatched = dice.random() < 0.2
        self.is_qat = dice.random() < 0.3
        self.dynamic = None
        if dice.random() < 0.25 and not self.is_qat:
            self.dynamic = dice.choice([default_dynamic_qconfig, per_channel_dynamic_qconfig])
        # The default moving average moves a range by 1% of a step's: after four calls it lags as far behind
        # as FX's, which ``test_qat_against_fx`` measures.
        self.lags = self.is_qat and dice.random() < 0.5
        self.dice = dice
        self.to(self.dtype)

    def forward(self, x: Tensor, state: Any = None) -> Any:
        return self.rnn(x) if state is None else self.rnn(x, state)

    def draw(self) -> tuple[Any, ...]:
        """Return arguments of a call."""
        steps, batch = self.dice.randint(1, 12), self.dice.randint(1, 5)
        rows = () if self.is_unbatched else (batch,)
        if self.is_cell:
            x = torch.randn(*rows, self.inputs, dtype=self.dtype)
            widths, lead = [self.rnn.hidden_size] * 2, rows
        else:
            shape = (batch, steps) if self.batch_first else (steps, batch)
            x = torch.randn(*((steps,) if self.is_unbatched else shape), self.inputs, dtype=self.dtype)
            widths = [self.rnn.proj_size or self.rnn.hidden_size, self.rnn.hidden_size]
            lead = (self.rnn.num_layers * (1 + self.rnn.bidirectional), *rows)
        if not self.gives_state:
            return (x,)
        states = tuple(torch.rand(*lead, width, dtype=self.dtype) - 0.5 for width in widths)
        return x, (states if isinstance(self.rnn, (nn.LSTM, nn.LSTMCell)) else states[0])

    def mapping(self) -> QConfigMapping:
        if self.dynamic is not None:
            return QConfigMapping().set_global(self.dynamic)
        if self.is_qat and not self.lags:
            return QConfigMapping().set_global(COVERING_QAT)
        return get_default_qat_qconfig_mapping() if self.is_qat else get_default_qconfig_mapping()


#: The outcome of the one kind of contract that is left float.
STAYS_FLOAT = "float: stays so, and says so"
FINE = ("passed", STAYS_FLOAT)


def run(seed: int) -> str:
    """Return the outcome of a contract: one of ``FINE``, or the fault."""
    torch.manual_seed(seed)
    contract = Contract(random.Random(seed))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _live(contract)
    except TorchQCompatError as refusal:
        return f"REFUSED {type(refusal).__name__}: {refusal}"
    except Exception:
        return f"RAW {traceback.format_exc(limit=-3)}"


def _live(contract: Contract) -> str:
    config = None if contract.dynamic else tc.get_default_prepare_custom_config()
    example, prepare = contract.draw(), tc.prepare_qat_fx if contract.is_qat else tc.prepare_fx
    contract.train(contract.is_qat)
    prepared = prepare(contract, contract.mapping(), example, config)
    # With one vector or sequence at a time, four calls would show the observers next to nothing.
    for _ in range(24 if contract.is_cell else 12 if contract.is_unbatched else 4):
        results = prepared(*contract.draw())
    if contract.is_qat:
        torch.stack([leaf.sum() for leaf in leaves(results)]).sum().backward()  # type: ignore[no-untyped-call]
    contract.eval()
    prepared.eval().apply(disable_observer)
    lowered = tc.convert_fx(prepared)
    reference = lowered.reference
    if contract.dynamic is not None and type(contract.rnn) is nn.RNN:
        # FX's backend has no dynamic nn.RNN.
        said = any(decision.action.value == "float" for decision in tc.explain(reference).decisions)
        return STAYS_FLOAT if said else "SILENT stays float"
    if not any(value.dtype is torch.int8 for value in reference.state_dict().values()):
        return "SILENT no weight is int8"
    # A single vector may lie beyond all that was seen.
    calls = [contract.draw() for _ in range(8 if contract.is_cell else 4 if contract.is_unbatched else 1)]

    def results_of(model: Any) -> list[Tensor]:
        return [leaf for call in calls for leaf in leaves(model(*call))]

    with torch.no_grad():
        for model in (reference, lowered):
            found = results_of(model)
            fault = "" if contract.lags else _compared(results_of(contract), found)
            if contract.is_qat:
                fault = fault or _compared(results_of(prepared), found, LEAST_DB_TRAINED, math.inf)
            if fault:
                return fault
        if not contract.is_cell and not contract.is_unbatched and not contract.gives_state:
            exact = prepared.get_submodule("rnn") if contract.lags else contract.rnn
            return _packed(contract, exact, reference) or "passed"
    return "passed"


def _packed(contract: Contract, exact: Any, reference: Any) -> str:
    """Compare the converted module with ``exact`` on a PackedSequence: as it is, and in the cell loop."""
    (x,) = contract.draw()
    batch, steps = (x.shape[0], x.shape[1]) if contract.batch_first else (x.shape[1], x.shape[0])
    lengths = torch.randint(1, steps + 1, (batch,))
    packed = pack_padded_sequence(x, lengths, contract.batch_first, enforce_sorted=False)
    converted = reference.get_submodule("rnn")
    expected = [leaf for leaf in leaves(exact(packed)) if leaf.is_floating_point()]
    for module in (converted, converted.lowered()):
        found = [leaf for leaf in leaves(module(packed)) if leaf.is_floating_point()]
        # The converted model may be bit-equal to the trained model.
        fault = _compared(expected, found, most=math.inf if contract.lags else MOST_DB)
        if fault:
            return f"packed: {fault}"
    return ""


def _compared(
    expected: list[Tensor], found: list[Tensor], least: float = LEAST_DB, most: float = MOST_DB
) -> str:
    if [(a.shape, a.dtype) for a in expected] != [(b.shape, b.dtype) for b in found]:
        return f"SHAPES {[(b.shape, b.dtype) for b in found]}"
    # Single small results may all lie on one step; together they are a signal.
    a, b = (torch.cat([each.flatten() for each in side]) for side in (expected, found))
    if not a.any():
        return "" if not b.any() else "something where the float model has zeros"  # of a dead ReLU
    decibels = float(sqnr(a, b))
    return "" if least < decibels <= most else f"SQNR {decibels:.1f} dB"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.recurrent_fuzzer")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no contract after so long")
    options = parser.parse_args()
    torch.set_num_threads(1)
    started, counts, seed = time.monotonic(), Counter[str](), options.seed
    while seed < options.seed + options.count and time.monotonic() - started < options.seconds:
        result = run(seed)
        counts[result.split()[0].rstrip(":")] += 1
        if result != "passed":
            print(seed, result, flush=True)
        seed += 1
    print(f"seeds {options.seed} to {seed - 1}: {dict(counts)}")
    return int(not set(counts) <= {fine.split()[0].rstrip(":") for fine in FINE})


if __name__ == "__main__":
    sys.exit(main())
