"""The calling contract of torch.nn's recurrent modules, apart from what happens inside a layer.

Source: the documentation of torch.nn.LSTM, GRU and RNN. Shapes are written with T steps, B batch, I inputs,
H hidden, P outputs (the projection size, or H), L layers, D directions. Internally a state is a tuple of
tensors, the hidden state first: (h, c) for LSTM, (h,) for GRU and RNN. Callers of a GRU or RNN pass and
receive ``h`` itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from torchq_compat.capture.packed_sequences import batch_in_call, is_step
from torchq_compat.errors import CustomModuleError
from torchq_compat.recurrent.cells import CellKind, kind_of
from torchq_compat.recurrent.over_time import packs_are_padded
from torchq_compat.support.process_state import is_exporting
from torchq_compat.support.upstream import pytree

State = tuple[Tensor, ...]


class RunLayers(Protocol):
    """(x (T, B, I), None or a state of (L*D, B, width)) -> (output (T, B, D*P), the last state).

    With ``batch_sizes`` x and the output are the rows of a PackedSequence. In an exported program
    ``batch_sizes`` is a mask (T, B) instead: a state does not change where the mask is false.
    """

    def __call__(
        self, x: Tensor, state: State | None, batch_sizes: list[int] | Tensor | None = None, /
    ) -> tuple[Tensor, State]: ...


@dataclass(frozen=True)
class RecurrentStructure:
    """The constructor arguments of a torch.nn.LSTM, GRU or RNN."""

    kind: CellKind
    input_size: int
    hidden_size: int
    num_layers: int
    bias: bool
    batch_first: bool
    dropout: float
    bidirectional: bool
    proj_size: int

    @classmethod
    def of(cls, module: nn.RNNBase) -> Self:
        given = {field.name: getattr(module, field.name) for field in fields(cls) if field.name != "kind"}
        return cls(kind_of(module), **{**given, "dropout": float(module.dropout)})

    @property
    def num_directions(self) -> int:
        return 2 if self.bidirectional else 1

    @property
    def output_size(self) -> int:
        """P, the width of the hidden state."""
        return self.proj_size or self.hidden_size

    @property
    def state_widths(self) -> tuple[int, ...]:
        """Width of every state, the hidden state first."""
        return (self.output_size, *(self.hidden_size for _ in self.kind.states[1:]))

    def batched_state_shapes(self, batch: Any) -> list[list[Any]]:
        """Return the shape of every state, (L*D, B, width)."""
        return [[self.num_layers * self.num_directions, batch, width] for width in self.state_widths]


def call_recurrent(
    structure: RecurrentStructure,
    path: str,
    run_layers: RunLayers,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, Any]:
    """Return ``module(*args, **kwargs)``, computed by ``run_layers``, in every form torch.nn accepts.

    Raises:
        CustomModuleError: if the float module would refuse the arguments; the message names ``path``.
    """
    x, hidden = bound_arguments(path, args, kwargs)
    if isinstance(x, PackedSequence):
        return _call_packed(structure, path, run_layers, x, hidden)
    _check_input(structure, path, x)
    batched = x.dim() == 3
    steps_first = x.unsqueeze(1) if not batched else x.transpose(0, 1) if structure.batch_first else x
    state = _initial_state(structure, path, steps_first, hidden, batched)
    output, last = run_layers(steps_first, state)
    if not batched:
        return output.squeeze(1), as_given(tuple(state.squeeze(1) for state in last))
    return (output.transpose(0, 1) if structure.batch_first else output), as_given(last)


def _call_packed(
    structure: RecurrentStructure, path: str, run_layers: RunLayers, packed: PackedSequence, hidden: Any
) -> tuple[PackedSequence, Any]:
    """Run a PackedSequence. Its rows are in sorted order, the state's rows in the caller's order."""
    batch, x = batch_in_call(), packed.data
    is_padded = batch is None and is_exporting()
    batch_sizes: list[int] | Tensor
    if is_padded:
        # In an exported program ``packed`` holds the rows of padded sequences.
        if not packs_are_padded():
            _refuse_packed(path)
        steps = packed.batch_sizes.shape[0]
        batch = x.shape[0] // steps
        x, batch_sizes = x.reshape(steps, batch, x.shape[1]), is_step(packed.batch_sizes, batch)
    else:
        _check_values(structure, path, x)
        # In a capture the batch sizes are data, and only the first of them, the batch size, is needed.
        batch_sizes = [int(size) for size in packed.batch_sizes] if batch is None else [batch]
        batch = batch_sizes[0]
    # Of the input it takes only the batch size.
    steps_first = x if is_padded else x.new_empty(0, batch, 0)
    state = _initial_state(structure, path, steps_first, hidden, True)
    if state is not None and packed.sorted_indices is not None:
        state = tuple(entry[:, packed.sorted_indices] for entry in state)
    rows, last = run_layers(x, state, batch_sizes)
    if is_padded:
        rows = rows.flatten(0, 1)
    if packed.unsorted_indices is not None:
        last = tuple(item[:, packed.unsorted_indices] for item in last)
    return packed._replace(data=rows), as_given(last)


# Dynamo runs it as it is, and lets the error out.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _refuse_packed(path: str) -> None:
    raise CustomModuleError.of("TQ941.packed", path=path)


def check_devices(kind: CellKind, path: str, arguments: tuple[Any, Any], device: torch.device | None) -> None:
    """Check that the tensors of a call are on ``device``, the module's device; None if it is not known.

    Raises:
        CustomModuleError: if one is not; names the argument. Arguments that are no tensors are skipped.
    """
    for name, value in _named_tensors(kind, *arguments):
        if device is not None and value.device != device:
            raise CustomModuleError.call_failed(
                path, f"{name} must be on {device} like the module, got {value.device}"
            )


def check_same_dtype(kind: CellKind, path: str, arguments: tuple[Any, Any]) -> None:
    """Check that the tensors a caller passes have one float dtype, as torch.nn requires without autocast.

    A graph may pass states of another float dtype than the input's, because a dequantize returns float32.

    Raises:
        CustomModuleError: if one differs; names the argument. Arguments that are no tensors are skipped.
    """
    named = _named_tensors(kind, *arguments)
    for name, value in named:
        check_is_float(path, name, value)
        first = named[0][1]
        if value.dtype != first.dtype and not torch.is_autocast_enabled(value.device.type):
            raise CustomModuleError.call_failed(
                path, f"{name} must be {first.dtype} like the input, got {value.dtype}"
            )


def _named_tensors(kind: CellKind, x: Any, hidden: Any) -> list[tuple[str, Tensor]]:
    x = x.data if isinstance(x, PackedSequence) else x
    states = hidden if isinstance(hidden, (tuple, list)) else (hidden,)
    named = [("the input", x), *zip((state.name for state in kind.states), states, strict=False)]
    return [(name, value) for name, value in named if isinstance(value, Tensor)]


def check_is_float(path: str, name: str, value: Tensor) -> None:
    """Check that a tensor is floating point and dense; the integers of a quantized tensor are refused, too.

    Raises:
        CustomModuleError: if it is not; names the argument.
    """
    if value.is_nested or value.layout is not torch.strided:
        kind = "nested" if value.is_nested else str(value.layout)
        raise CustomModuleError.call_failed(path, f"{name} must be a dense tensor, got one that is {kind}")
    if not value.dtype.is_floating_point:
        raise CustomModuleError.call_failed(path, f"{name} must be floating point, got {value.dtype}")


def bound_arguments(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Return input and state: ``input, hx`` in torch.nn, ``x, hidden`` in torch.ao's quantizable LSTM.

    Raises:
        CustomModuleError: if the float module would refuse the arguments.
    """
    given = dict(zip(("input", "hx"), args, strict=False))
    for name, value in kwargs.items():
        legacy_name = {"x": "input", "hidden": "hx"}.get(name, name)
        if legacy_name not in ("input", "hx") or legacy_name in given:
            raise CustomModuleError.call_failed(path, f"unexpected or repeated argument {name!r}")
        given[legacy_name] = value
    if len(args) > 2 or "input" not in given:
        raise CustomModuleError.call_failed(path, "it takes an input and an optional state")
    return given["input"], given.get("hx")


def _check_input(structure: RecurrentStructure, path: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        raise CustomModuleError.call_failed(path, f"the input must be a tensor, got {type(x).__name__}")
    if x.dim() not in (2, 3):
        raise CustomModuleError.call_failed(path, f"the input must have 2 or 3 dimensions, got {x.dim()}")
    _check_values(structure, path, x)
    if not is_exporting() and x.shape[1 if structure.batch_first and x.dim() == 3 else 0] == 0:
        raise CustomModuleError.call_failed(path, "the sequence has no steps")


def _check_values(structure: RecurrentStructure, path: str, x: Tensor) -> None:
    check_is_float(path, "the input", x)
    if x.shape[-1] != structure.input_size:
        size = shown(x.shape)[-1]
        raise CustomModuleError.call_failed(
            path, f"the input's last dimension must be {structure.input_size}, got {size}"
        )


def _initial_state(
    structure: RecurrentStructure, path: str, x: Tensor, hidden: Any, batched: bool
) -> State | None:
    if hidden is None:
        return None
    states = check_state_count(structure.kind, path, hidden)
    return tuple(
        _state(path, state.name, value, shape, batched)
        for state, value, shape in zip(
            structure.kind.states, states, structure.batched_state_shapes(x.shape[1]), strict=True
        )
    )


def check_state_count(kind: CellKind, path: str, hidden: Any) -> tuple[Any, ...]:
    """Return the states in ``hidden`` as a tuple: the pair of an LSTM, or the one tensor of a GRU or RNN."""
    if len(kind.states) == 1:
        return (hidden,)
    if not isinstance(hidden, (tuple, list)) or len(hidden) != len(kind.states):
        names = ", ".join(state.name for state in kind.states)
        raise CustomModuleError.call_failed(path, f"the state must be a pair ({names})")
    return tuple(hidden)


def as_given(state: State) -> Any:
    """Return ``state`` as torch.nn returns it: a tuple of several tensors, or the one tensor."""
    return state if len(state) > 1 else state[0]


def _state(path: str, name: str, state: Any, expected: list[Any], batched: bool) -> Tensor:
    if not isinstance(state, Tensor):
        raise CustomModuleError.call_failed(path, f"{name} must be a tensor, got {type(state).__name__}")
    check_is_float(path, name, state)
    if state.dim() != (3 if batched else 2):
        raise CustomModuleError.call_failed(
            path, f"{name} must have {3 if batched else 2} dimensions like the input, got {state.dim()}"
        )
    batched_state = state if batched else state.unsqueeze(1)
    if list(batched_state.shape) != expected:
        raise CustomModuleError.call_failed(
            path, f"{name} must have shape {shown(expected)}, got {shown(batched_state.shape)}"
        )
    return batched_state


def shown(shape: Sequence[Any]) -> tuple[int, ...]:
    """Return ``shape`` for messages: a symbolic dimension is shown as its size in the example inputs."""
    return tuple(size.node.hint if isinstance(size, torch.SymInt) else int(size) for size in shape)


def check_example_inputs(module: nn.Module, example_inputs: Any) -> None:
    """Check the widths in ``(x, (h, c))`` against ``module``; FX scripts pass cell or sequence shapes.

    Raises:
        CustomModuleError: if one does not fit; names the first.
    """
    assert isinstance(module, (nn.RNNBase, nn.RNNCellBase))
    states = kind_of(module).states
    widths: tuple[int, ...] = (module.hidden_size,) * len(states)
    if isinstance(module, nn.RNNBase):
        widths = RecurrentStructure.of(module).state_widths
    names = ("x", *(state.name for state in states))
    expected = zip(names, (module.input_size, *widths), strict=True)
    given = [leaf for leaf in pytree.tree_leaves(example_inputs) if leaf is not None]
    tensors = [leaf for leaf in given if isinstance(leaf, Tensor)]
    if len(tensors) != len(given) or not tensors:
        raise CustomModuleError.call_failed("example_inputs", "they must be tensors, as (x, state)")
    for (name, width), tensor in zip(expected, tensors, strict=False):
        if tensor.dim() == 0 or tensor.shape[-1] != width:
            raise CustomModuleError.call_failed(
                "example_inputs", f"{name} must be {width} wide, got shape {tuple(tensor.shape)}"
            )


def fake_layers(structure: RecurrentStructure) -> RunLayers:
    """Return a ``run_layers`` that computes only shapes."""

    def run(
        x: Tensor, state: State | None, batch_sizes: list[int] | Tensor | None = None
    ) -> tuple[Tensor, State]:
        width = structure.num_directions * structure.output_size
        batch = batch_sizes[0] if isinstance(batch_sizes, list) else x.shape[1]
        return x.new_empty(*x.shape[:-1], width), tuple(
            map(x.new_empty, structure.batched_state_shapes(batch))
        )

    return run
