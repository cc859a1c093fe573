"""Random recurrent modules and ways to call them, and the check that every such point passes.

The states of the modules are as large as those of trained ones. The bars of a sweep allow for their 8-bit
edges.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.ao.quantization import get_default_qconfig_mapping
from torch.ao.quantization.fx.custom_config import PrepareCustomConfig
from torch.fx import GraphModule

import torchq_compat as tc
from tests.helpers.lstm_flow import uniform
from tests.helpers.oracle import leaves, sqnr
from torchq_compat.annotate.observed_graph import observer_nodes

__all__ = ["Kind", "Point", "Profile", "check", "points", "sweep"]

SEQUENCES = 32


@dataclass(frozen=True)
class Kind:
    """A recurrence of torch.nn.

    Attributes:
        name: for people.
        make: makes the module over sequences, from the arguments of nn.LSTM.
        make_cell: makes the module for one step, from input size, hidden size and ``bias``.
        observe: makes the mapping to an observed class, from the constructors of its parts.
        states: the size of the values of each initial state.
        bias: of each gate, as after training; one number for a recurrence without gates.
        sums: numbers of gate sums with one projection pair, and with one pair per gate.
        others: the number of parts that are neither a projection nor a sum of gates.
    """

    name: str
    make: Callable[..., nn.RNNBase]
    make_cell: Callable[..., nn.RNNCellBase]
    observe: Callable[..., PrepareCustomConfig]
    states: tuple[float, ...]
    bias: tuple[float, ...]
    sums: tuple[int, int]
    others: int

    def __repr__(self) -> str:
        return self.name

    def parts_and_weights(self, *, split_gates: bool, projected: bool) -> int:
        """Return the number of observers in one cell: projection pairs, weights, sums, the rest."""
        pairs = len(self.bias) if split_gates else 1
        return 4 * pairs + self.sums[split_gates] + self.others + 2 * projected


@dataclass(frozen=True)
class Profile:
    """Constructors of parts, and the SQNR in dB that every result has to reach, by kind.

    Attributes:
        requantizes: whether the hidden state has another dtype than the inputs of projections.
    """

    make: Callable[[nn.Module], dict[str, Any]]
    bars: Mapping[str, float]
    requantizes: bool = False

    def __repr__(self) -> str:
        return self.make.__name__


@dataclass(frozen=True)
class Point:
    """A recurrent module and one way to call it; a single step has one layer and one direction."""

    kind: Kind
    single_step: bool
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
        """The number of outputs, one for every ``share`` hidden units; 0 for no projection."""
        return self.hidden_size // self.share if self.share else 0

    @property
    def directions(self) -> int:
        return 2 if self.bidirectional else 1

    @property
    def rows(self) -> int:
        return self.num_layers * self.directions

    def build(self) -> Model:
        torch.manual_seed(self.seed)
        if self.single_step:
            cell = self.kind.make_cell(self.input_size, self.hidden_size, bias=self.bias)
            with torch.no_grad():
                self._fill_gates(cell, "", 3**-0.5)
            return Model(cell).eval()
        module = self.kind.make(
            self.input_size,
            self.hidden_size,
            self.num_layers,
            bias=self.bias,
            batch_first=self.batch_first,
            dropout=self.dropout if self.num_layers > 1 else 0.0,
            bidirectional=self.bidirectional,
            **({"proj_size": self.proj_size} if self.share else {}),
        )
        x = uniform(1.0, 16, 16, self.input_size)
        with torch.no_grad():
            for layer in range(self.num_layers):
                incoming = self._hidden_states(module, x, layer - 1) if layer else x
                for direction in range(self.directions):
                    suffix = f"_l{layer}{'_reverse' * direction}"
                    self._fill_gates(module, suffix, float(incoming.square().mean().sqrt()))
                    if self.proj_size:
                        self._fill_projection(getattr(module, f"weight_hr{suffix}"))
        return Model(module).eval()

    def _hidden_states(self, module: nn.RNNBase, x: Tensor, layer: int) -> Tensor:
        """Return the last hidden states of ``layer``, in both directions."""
        _, h_n, *_ = leaves(module(x))
        return h_n[layer * self.directions :][: self.directions]

    def _fill_gates(self, module: nn.Module, suffix: str, incoming: float) -> None:
        """Set weights for gate sums of standard deviation 0.8, and a bias that opens gates, as if trained."""
        from_x, from_h = getattr(module, f"weight_ih{suffix}"), getattr(module, f"weight_hh{suffix}")
        spread = 1.2 if self.bias else 1.4
        from_x.copy_(uniform(spread / incoming / from_x.shape[1] ** 0.5, *from_x.shape))
        from_h.copy_(uniform(0.3 / from_h.shape[1] ** 0.5, *from_h.shape))
        if self.bias:
            opened = torch.tensor(self.kind.bias).repeat_interleave(self.hidden_size)
            getattr(module, f"bias_ih{suffix}").copy_(opened + uniform(0.2, *opened.shape))

    def _fill_projection(self, weight: Tensor) -> None:
        """Fill ``weight`` so that each output mixes ``share`` hidden units and is as large as they are,
        within the [-1, 1) of a scale of 2^-7."""
        mixed = torch.arange(self.hidden_size) // self.share == torch.arange(self.proj_size)[:, None]
        signs = torch.sign(torch.rand(weight.shape) - 0.5)
        weight.copy_(mixed * signs * 1.15 / self.share + uniform(0.02, *weight.shape))

    def arguments(self, steps: int, batch: int) -> tuple[Tensor, ...]:
        x = uniform(1.0, steps, batch, self.input_size)
        widths = (self.proj_size or self.hidden_size, self.hidden_size)
        states = tuple(
            uniform(size, self.rows, batch, width)
            for size, width in zip(self.kind.states, widths, strict=False)
        )
        if self.single_step:
            x, states = x[0], tuple(state[0] for state in states)
            if not self.batched:
                x, states = x[0], tuple(state[0] for state in states)
        elif not self.batched:
            x, states = x[:, 0], tuple(state[:, 0] for state in states)
        elif self.batch_first:
            x = x.transpose(0, 1).contiguous()
        return (x, *states) if self.state_given else (x,)

    def data(self) -> list[tuple[Tensor, ...]]:
        """Return calls of another length and batch than prepared for: one, or one for each sequence."""
        if self.batched:
            return [self.arguments(self.other_steps, SEQUENCES)]
        return [self.arguments(self.other_steps, 1) for _ in range(SEQUENCES // 2)]

    def observer_count(self) -> int:
        """Return the number of observers in cells and at the module's edges, for any length."""
        projected = bool(self.share)
        in_cells = self.kind.parts_and_weights(split_gates=self.split_gates, projected=projected)
        requantized = 0
        if self.profile.requantizes:
            # In front of hgates, of the next layer's igates, and of a projection.
            requantized = self.rows * (1 + projected) + self.rows * (self.num_layers - 1) // self.num_layers
        inputs = 1 + len(self.kind.states) if self.state_given else 1
        return self.rows * in_cells + requantized + inputs


class Model(nn.Module):
    def __init__(self, recurrent: nn.Module) -> None:
        super().__init__()
        self.recurrent = recurrent

    def forward(self, x: Tensor, h: Tensor | None = None, c: Tensor | None = None) -> Any:
        if h is None:
            return self.recurrent(x)
        return self.recurrent(x, h if c is None else (h, c))


def points(
    kinds: tuple[Kind, ...], profiles: tuple[Profile, ...], *, single_step: bool = False
) -> st.SearchStrategy[Point]:
    """Return random points: projections only for LSTM, split gates only where there are gates."""
    sequence = not single_step

    def of_kind(kind: Kind) -> st.SearchStrategy[Point]:
        return st.builds(
            Point,
            kind=st.just(kind),
            single_step=st.just(single_step),
            profile=st.sampled_from(profiles),
            num_layers=st.integers(1, 2 if sequence else 1),
            bidirectional=st.booleans() if sequence else st.just(False),
            batch_first=st.booleans() if sequence else st.just(False),
            bias=st.booleans(),
            dropout=st.sampled_from((0.0, 0.4)),
            split_gates=st.booleans() if len(kind.bias) > 1 else st.just(False),
            batched=st.booleans(),
            state_given=st.booleans(),
            input_size=st.integers(4, 12),
            hidden_size=st.integers(12, 24),
            share=st.sampled_from((0, 0, 2, 3)) if sequence and kind.make is nn.LSTM else st.just(0),
            steps=st.integers(1, 6),
            other_steps=st.integers(1, 5),
            batch=st.integers(1, 4),
            seed=st.integers(0, 2**16),
        )

    return st.sampled_from(kinds).flatmap(of_kind) if len(kinds) > 1 else of_kind(kinds[0])


def observers(prepared: nn.Module) -> set[nn.Module]:
    return {
        observer
        for module in prepared.modules()
        if isinstance(module, GraphModule)
        for _, observer in observer_nodes(module)
    }


def together(results: list[Any]) -> list[Tensor]:
    """Concatenate each result of several calls into one vector."""
    return [torch.cat([t.flatten() for t in column]) for column in zip(*map(leaves, results), strict=True)]


@contextmanager
def single_steps_are_meant(point: Point) -> Iterator[None]:
    """Ignore the warning about calibration with single steps, for points that are also measured with them."""
    with warnings.catch_warnings():
        if point.other_steps == 1:
            warnings.filterwarnings("ignore", "the recurrent module at .* was calibrated with single steps")
        yield


def check(point: Point) -> list[float]:
    """Check that prepared equals float, converted is as accurate as promised, the length changes nothing."""
    model = point.build()
    constructors = point.profile.make(model.recurrent)
    config = point.kind.observe(split_gates=point.split_gates, **constructors)
    mapping = get_default_qconfig_mapping("qnnpack")
    prepared = tc.prepare_fx(model, mapping, point.arguments(point.steps, point.batch), config)
    assert len(observers(prepared)) == point.observer_count()
    data = point.data()
    with torch.no_grad():
        exact = [model(*args) for args in data]
        # Calibrated on the data of the measurement: the loss comes from quantization, not from unseen values.
        observed = [prepared(*args) for args in data]
        assert len(observers(prepared)) == point.observer_count()
        with single_steps_are_meant(point):
            converted = tc.convert_to_reference_fx(prepared)
        quantized = [converted(*args) for args in data]
    for a, b, q in zip(*(together(results) for results in (exact, observed, quantized)), strict=True):
        assert a.shape == b.shape == q.shape
        assert float((a - b).abs().max()) < 1e-5
    shapes = [[leaf.shape for leaf in leaves(results[0])] for results in (exact, quantized)]
    assert shapes[0] == shapes[1]
    found = [sqnr(a, q) for a, q in zip(together(exact), together(quantized), strict=True)]
    assert point.profile.bars[point.kind.name] < min(found), found
    assert max(found) < 60, found
    return found


# A point takes a second; shrinking a failure would take minutes and only make it less typical.
sweep = settings(
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
