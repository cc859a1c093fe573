"""The contract of nn.LSTM, swept: what is prepared equals the float module, what is converted is close to it.

The random LSTMs have states as large as a trained one's. Their 8-bit edges are what the bars allow for:
``int16_parts`` keeps the projections, tanh(c) and the hidden state (on 2^-7) at 8 bits, as torch.ao documents
it, which costs it the 33 dB that ``int16_everywhere``, the same with these four at 16 bits, reaches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.ao.quantization import get_default_qconfig_mapping
from torch.fx import GraphModule

import torchq_compat as tc
from tests.oracle import calibrate, leaves, sqnr
from tests.test_lstm_parts import fixed, map_to_parts, uniform
from torchq_compat import profiles
from torchq_compat.observed_graph import observer_nodes


def int16_everywhere() -> dict[str, Any]:
    """The documented profile without the 8 bits it leaves inside the cell."""
    return {
        **profiles.int16_parts(),
        "igates_obs_ctr": fixed(2**-11, 0, torch.qint32),
        "hgates_obs_ctr": fixed(2**-11, 0, torch.qint32),
        "tanh_cell_state_obs_ctr": fixed(2**-15, 0, torch.qint32),
        "hidden_state_obs_ctr": fixed(2**-14, 0, torch.int16),
    }


@dataclass(frozen=True)
class Profile:
    """Constructors, and the SQNR in dB every result has to reach."""

    make: Callable[[], dict[str, Any]]
    bar: float

    def __repr__(self) -> str:
        return self.make.__name__


PROFILES = (
    Profile(profiles.int8_parts, 25),
    Profile(profiles.int16_parts, 27),
    Profile(profiles.int8_with_int16_cell, 33),
    Profile(int16_everywhere, 33),
)
SEQUENCES = 32


@dataclass(frozen=True)
class Point:
    """One LSTM and one way to call it."""

    profile: Profile
    num_layers: int
    bidirectional: bool
    batch_first: bool
    bias: bool
    dropout: float
    split_gates: bool
    batched: bool
    state_given: bool
    input_size: int
    hidden_size: int
    share: int
    steps: int
    other_steps: int
    batch: int
    seed: int

    @property
    def proj_size(self) -> int:
        """One output for every ``share`` hidden units; 0: no projection."""
        return self.hidden_size // self.share if self.share else 0

    @property
    def directions(self) -> int:
        return 2 if self.bidirectional else 1

    @property
    def rows(self) -> int:
        return self.num_layers * self.directions

    def build(self) -> Model:
        torch.manual_seed(self.seed)
        lstm = nn.LSTM(
            self.input_size,
            self.hidden_size,
            self.num_layers,
            bias=self.bias,
            batch_first=self.batch_first,
            dropout=self.dropout if self.num_layers > 1 else 0.0,
            bidirectional=self.bidirectional,
            proj_size=self.proj_size,
        )
        x = uniform(1.0, 16, 16, self.input_size)
        with torch.no_grad():
            for layer in range(self.num_layers):
                arriving = self._states(lstm, x, layer - 1) if layer else x
                for direction in range(self.directions):
                    suffix = f"_l{layer}{'_reverse' * direction}"
                    self._fill_gates(lstm, suffix, float(arriving.square().mean().sqrt()))
                    if self.proj_size:
                        self._fill_projection(getattr(lstm, f"weight_hr{suffix}"))
        return Model(lstm).eval()

    def _states(self, lstm: nn.LSTM, x: Tensor, layer: int) -> Tensor:
        """The last hidden states of ``layer``, of both directions."""
        _, (h_n, _) = lstm(x)
        return h_n[layer * self.directions :][: self.directions]

    def _fill_gates(self, lstm: nn.LSTM, suffix: str, arriving: float) -> None:
        """Gate sums of standard deviation about 0.8, and a bias that opens the gates, as training gives."""
        from_x, from_h = getattr(lstm, f"weight_ih{suffix}"), getattr(lstm, f"weight_hh{suffix}")
        spread = 1.2 if self.bias else 1.4
        from_x.copy_(uniform(spread / arriving / from_x.shape[1] ** 0.5, *from_x.shape))
        from_h.copy_(uniform(0.3 / from_h.shape[1] ** 0.5, *from_h.shape))
        if self.bias:
            opened = torch.tensor([1.0, 1.0, 0.0, 1.0]).repeat_interleave(self.hidden_size)
            getattr(lstm, f"bias_ih{suffix}").copy_(opened + uniform(0.2, 4 * self.hidden_size))

    def _fill_projection(self, weight: Tensor) -> None:
        """Outputs that mix ``share`` hidden units each: as large as those, and within the [-1, 1) of 2^-7."""
        mixed = torch.arange(self.hidden_size) // self.share == torch.arange(self.proj_size)[:, None]
        signs = torch.sign(torch.rand(weight.shape) - 0.5)
        weight.copy_(mixed * signs * 1.15 / self.share + uniform(0.02, *weight.shape))

    def arguments(self, steps: int, batch: int) -> tuple[Tensor, ...]:
        x = uniform(1.0, steps, batch, self.input_size)
        states = (
            uniform(0.8, self.rows, batch, self.proj_size or self.hidden_size),
            uniform(0.7, self.rows, batch, self.hidden_size),
        )
        if not self.batched:
            x, states = x[:, 0], (states[0][:, 0], states[1][:, 0])
        elif self.batch_first:
            x = x.transpose(0, 1).contiguous()
        return (x, *states) if self.state_given else (x,)

    def data(self) -> list[tuple[Tensor, ...]]:
        """Calls with ``SEQUENCES`` sequences in all, of another length and batch than were prepared."""
        if self.batched:
            return [self.arguments(self.other_steps, SEQUENCES)]
        return [self.arguments(self.other_steps, 1) for _ in range(SEQUENCES)]

    def observer_count(self) -> int:
        """What the parts of the cells and the edges of the module need; no sequence length in it."""
        pairs, projected = (4 if self.split_gates else 1), bool(self.share)
        parts_and_weights = 5 * pairs + 9 + 2 * projected
        requantized = 0
        if self.profile.make is int16_everywhere:
            # An int16 hidden state is quantized again before hgates, the next layer's igates, a projection.
            requantized = self.rows * (1 + projected) + self.rows * (self.num_layers - 1) // self.num_layers
        return self.rows * parts_and_weights + requantized + (3 if self.state_given else 1)


class Model(nn.Module):
    def __init__(self, lstm: nn.LSTM) -> None:
        super().__init__()
        self.lstm = lstm

    def forward(self, x: Tensor, h: Tensor | None = None, c: Tensor | None = None) -> Any:
        return self.lstm(x) if h is None else self.lstm(x, (h, c))


POINTS = st.builds(
    Point,
    profile=st.sampled_from(PROFILES),
    num_layers=st.integers(1, 2),
    bidirectional=st.booleans(),
    batch_first=st.booleans(),
    bias=st.booleans(),
    dropout=st.sampled_from((0.0, 0.4)),
    split_gates=st.booleans(),
    batched=st.booleans(),
    state_given=st.booleans(),
    input_size=st.integers(4, 12),
    hidden_size=st.integers(12, 24),
    share=st.sampled_from((0, 0, 2, 3)),
    steps=st.integers(1, 6),
    other_steps=st.integers(1, 5),
    batch=st.integers(1, 4),
    seed=st.integers(0, 2**16),
)


def observers(prepared: nn.Module) -> set[nn.Module]:
    return {
        observer
        for module in prepared.modules()
        if isinstance(module, GraphModule)
        for _, observer in observer_nodes(module)
    }


def together(results: list[Any]) -> list[Tensor]:
    """Output, h_n and c_n of several calls, as three vectors."""
    return [torch.cat([t.flatten() for t in column]) for column in zip(*map(leaves, results), strict=True)]


def check(point: Point) -> list[float]:
    model = point.build()
    config = map_to_parts(split_gates=point.split_gates, **point.profile.make())
    mapping = get_default_qconfig_mapping("qnnpack")
    prepared = tc.prepare_fx(model, mapping, point.arguments(point.steps, point.batch), config)
    assert len(observers(prepared)) == point.observer_count()
    data = point.data()
    with torch.no_grad():
        exact = [model(*args) for args in data]
        # Calibrated on what is measured: what is lost is lost by quantization, not by values never seen.
        observed = [prepared(*args) for args in data]
        calibrate(prepared, point.data())
        assert len(observers(prepared)) == point.observer_count()
        converted = tc.convert_to_reference_fx(prepared)
        quantized = [converted(*args) for args in data]
    for a, b, q in zip(*(together(results) for results in (exact, observed, quantized)), strict=True):
        assert a.shape == b.shape == q.shape
        assert float((a - b).abs().max()) < 1e-5
    shapes = [[leaf.shape for leaf in leaves(results[0])] for results in (exact, quantized)]
    assert shapes[0] == shapes[1]
    found = [sqnr(a, q) for a, q in zip(together(exact), together(quantized), strict=True)]
    assert point.profile.bar < min(found), found
    assert max(found) < 60, found
    return found


# A point costs a second; shrinking a failure would cost minutes and only make it less typical.
sweep = settings(
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)


@settings(sweep, max_examples=30)
@given(point=POINTS)
def test_contract(point: Point) -> None:
    check(point)


@pytest.mark.slow
@settings(sweep, max_examples=240)
@given(point=POINTS)
def test_contract_at_length(point: Point) -> None:
    check(point)
