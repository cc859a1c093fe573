"""The calling contract of torch.nn.LSTM, apart from what happens inside a layer.

Source: the documentation of torch.nn.LSTM. Shapes are written with T steps, B batch, I inputs, H hidden,
P outputs (the projection size, or H), L layers, D directions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from torchq_compat.custom_modules.recurrent.errors import RecurrentModuleError
from torchq_compat.errors import CustomModuleError

__all__ = ["LSTMStructure", "State", "call_lstm", "check_example_inputs", "fake_layers"]

State = tuple[Tensor, Tensor]


class RunLayers(Protocol):
    """(x (T, B, I), None or (h0 (L*D, B, P), c0 (L*D, B, H))) -> (output (T, B, D*P), (h_n, c_n)).

    With ``batch_sizes`` the rows of x and of the output are those of a PackedSequence.
    """

    def __call__(
        self, x: Tensor, state: State | None, batch_sizes: list[int] | None = None, /
    ) -> tuple[Tensor, State]: ...


@dataclass(frozen=True)
class LSTMStructure:
    """The constructor arguments of a torch.nn.LSTM."""

    input_size: int
    hidden_size: int
    num_layers: int
    bias: bool
    batch_first: bool
    dropout: float
    bidirectional: bool
    proj_size: int

    @classmethod
    def of(cls, lstm: nn.LSTM) -> LSTMStructure:
        return cls(
            input_size=lstm.input_size,
            hidden_size=lstm.hidden_size,
            num_layers=lstm.num_layers,
            bias=lstm.bias,
            batch_first=lstm.batch_first,
            dropout=float(lstm.dropout),
            bidirectional=lstm.bidirectional,
            proj_size=lstm.proj_size,
        )

    @property
    def num_directions(self) -> int:
        return 2 if self.bidirectional else 1

    @property
    def output_size(self) -> int:
        """P: width of the hidden state."""
        return self.proj_size or self.hidden_size


def call_lstm(
    structure: LSTMStructure, path: str, run_layers: RunLayers, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, State]:
    """``lstm(*args, **kwargs)`` in every form torch.nn.LSTM accepts, around ``run_layers``.

    Raises:
        CustomModuleError: arguments torch.nn.LSTM would refuse; the message names ``path``.
    """
    x, hidden = _bind(path, args, kwargs)
    if isinstance(x, PackedSequence):
        return _call_packed(structure, path, run_layers, x, hidden)
    _check_input(structure, path, x)
    batched = x.dim() == 3
    steps_first = _steps_first(structure, x)
    state = _initial_state(structure, path, steps_first, hidden, batched)
    output, (h_n, c_n) = run_layers(steps_first, state)
    if not batched:
        return output.squeeze(1), (h_n.squeeze(1), c_n.squeeze(1))
    return (output.transpose(0, 1) if structure.batch_first else output), (h_n, c_n)


def _call_packed(
    structure: LSTMStructure, path: str, run_layers: RunLayers, packed: PackedSequence, hidden: Any
) -> tuple[PackedSequence, State]:
    """Rows of the state follow the caller's order of sequences, the packed rows the sorted one."""
    if torch.compiler.is_exporting():
        raise RecurrentModuleError.packed_in_export(path)
    if packed.data.shape[-1] != structure.input_size:
        raise CustomModuleError.call_failed(
            path, f"the input's last dimension must be {structure.input_size}, got {packed.data.shape[-1]}"
        )
    batch_sizes = [int(size) for size in packed.batch_sizes]
    state = _initial_state(structure, path, packed.data.new_empty(0, batch_sizes[0], 0), hidden, True)
    if state is not None and packed.sorted_indices is not None:
        state = (state[0][:, packed.sorted_indices], state[1][:, packed.sorted_indices])
    rows, (h_n, c_n) = run_layers(packed.data, state, batch_sizes)
    if packed.unsorted_indices is not None:
        h_n, c_n = h_n[:, packed.unsorted_indices], c_n[:, packed.unsorted_indices]
    output = PackedSequence(rows, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices)
    return output, (h_n, c_n)


def _bind(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """nn.LSTM calls its arguments ``input, hx``; the quantizable LSTM calls them ``x, hidden``."""
    given = dict(zip(("input", "hx"), args, strict=False))
    for name, value in kwargs.items():
        legacy_name = {"x": "input", "hidden": "hx"}.get(name, name)
        if legacy_name not in ("input", "hx") or legacy_name in given:
            raise CustomModuleError.call_failed(path, f"unexpected or repeated argument {name!r}")
        given[legacy_name] = value
    if len(args) > 2 or "input" not in given:
        raise CustomModuleError.call_failed(path, "it takes an input and an optional (h, c)")
    return given["input"], given.get("hx")


def _check_input(structure: LSTMStructure, path: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        raise CustomModuleError.call_failed(path, f"the input must be a tensor, got {type(x).__name__}")
    if x.dim() not in (2, 3):
        raise CustomModuleError.call_failed(path, f"the input must have 2 or 3 dimensions, got {x.dim()}")
    if not x.dtype.is_floating_point:
        raise CustomModuleError.call_failed(path, f"the input must be floating point, got {x.dtype}")
    if x.shape[-1] != structure.input_size:
        size = shown(x.shape)[-1]
        raise CustomModuleError.call_failed(
            path, f"the input's last dimension must be {structure.input_size}, got {size}"
        )
    if not torch.compiler.is_exporting() and x.shape[_time_axis(structure, x)] == 0:
        raise CustomModuleError.call_failed(path, "the sequence has no steps")


def _time_axis(structure: LSTMStructure, x: Tensor) -> int:
    return 1 if structure.batch_first and x.dim() == 3 else 0


def _steps_first(structure: LSTMStructure, x: Tensor) -> Tensor:
    if x.dim() == 2:
        return x.unsqueeze(1)
    return x.transpose(0, 1) if structure.batch_first else x


def _initial_state(
    structure: LSTMStructure, path: str, x: Tensor, hidden: Any, batched: bool
) -> State | None:
    if hidden is None:
        return None
    rows = structure.num_layers * structure.num_directions
    widths = (structure.output_size, structure.hidden_size)
    if not isinstance(hidden, (tuple, list)) or len(hidden) != 2:
        raise CustomModuleError.call_failed(path, "the state must be a pair (h, c)")
    h, c = (
        _state(path, name, state, (rows, x.shape[1], width), batched)
        for name, state, width in zip(("h", "c"), hidden, widths, strict=True)
    )
    return h, c


def _state(path: str, name: str, state: Any, expected: tuple[int, Any, int], batched: bool) -> Tensor:
    if not isinstance(state, Tensor):
        raise CustomModuleError.call_failed(path, f"{name} must be a tensor, got {type(state).__name__}")
    if state.dim() != (3 if batched else 2):
        raise CustomModuleError.call_failed(
            path, f"{name} must have {3 if batched else 2} dimensions like the input, got {state.dim()}"
        )
    batched_state = state if batched else state.unsqueeze(1)
    if tuple(batched_state.shape) != expected:
        raise CustomModuleError.call_failed(
            path, f"{name} must have shape {shown(expected)}, got {shown(batched_state.shape)}"
        )
    return batched_state


def shown(shape: Sequence[Any]) -> tuple[int, ...]:
    """``shape`` for people: the size an example has, for a dimension that capture made symbolic."""
    return tuple(size.node.hint if isinstance(size, torch.SymInt) else int(size) for size in shape)


def check_example_inputs(lstm: nn.LSTM, example_inputs: Any) -> None:
    """Whether the widths in ``(x, (h, c))`` are those of ``lstm``; FX scripts give cell or sequence shapes.

    Raises:
        CustomModuleError: they are not; names the first that does not fit.
    """
    structure = LSTMStructure.of(lstm)
    expected = (
        ("x", structure.input_size),
        ("h", structure.output_size),
        ("c", structure.hidden_size),
    )
    tensors = [leaf for leaf in pytree.tree_leaves(example_inputs) if isinstance(leaf, Tensor)]
    for (name, width), tensor in zip(expected, tensors, strict=False):
        if tensor.dim() == 0 or tensor.shape[-1] != width:
            raise CustomModuleError.call_failed(
                "example_inputs", f"{name} must be {width} wide, got shape {tuple(tensor.shape)}"
            )


def fake_layers(structure: LSTMStructure) -> RunLayers:
    """``run_layers`` that computes shapes only."""

    def run(x: Tensor, state: State | None, batch_sizes: list[int] | None = None) -> tuple[Tensor, State]:
        rows = structure.num_layers * structure.num_directions
        width = structure.num_directions * structure.output_size
        return x.new_empty(x.shape[0], x.shape[1], width), (
            x.new_empty(rows, x.shape[1], structure.output_size),
            x.new_empty(rows, x.shape[1], structure.hidden_size),
        )

    return run
