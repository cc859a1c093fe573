"""Contracts of recurrent modules: how a module is called, which cells it holds, how a runner runs them.

``SequenceContract`` is the contract of LSTM, GRU and RNN. ``CellContract``, that of their cells, has the same
methods.

Source: the documentation of torch.nn.LSTM, GRU and RNN. Shapes are written with T steps, B batch, I inputs,
H hidden, P outputs (the projection size, or H), L layers, D directions. Internally a state is a tuple of
tensors, the hidden state first: (h, c) for LSTM, (h,) for GRU and RNN. Callers of a GRU or RNN pass and
receive ``h`` itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from torchq_compat.capture.opaque_stub import FakeCall
from torchq_compat.capture.packed_sequences import batch_in_call, is_step
from torchq_compat.errors import CustomModuleError
from torchq_compat.modules.parts import converted_qparams
from torchq_compat.read.qparams import QParams, combined
from torchq_compat.recurrent.cell_graph import CellGraphModule
from torchq_compat.recurrent.cells import CellKind, kind_of
from torchq_compat.recurrent.kernel.program import column_qparams
from torchq_compat.recurrent.over_time import (
    RecurrentDirection,
    RecurrentLayer,
    Runner,
    Sequences,
    State,
    packs_are_padded,
)
from torchq_compat.support.dtypes import as_dtype
from torchq_compat.support.process_state import is_compiling, is_exporting
from torchq_compat.support.upstream import pytree

#: The qparams of the input, in the structure in which a call passes the input; None if they are not known.
InputQParams = Any


class RunLayers(Protocol):
    """(x (T, B, I), None or a state of (L*D, B, width)) -> (output (T, B, D*P), the last state).

    With ``batch_sizes`` x and the output are the rows of a PackedSequence. In an exported program
    ``batch_sizes`` is a mask (T, B) instead: a state does not change where the mask is false.
    """

    def __call__(
        self, x: Tensor, state: State | None, batch_sizes: list[int] | Tensor | None = None, /
    ) -> tuple[Tensor, State]: ...


@dataclass(frozen=True)
class SequenceContract:
    """The contract of LSTM, GRU and RNN, by their constructor arguments: layers over time. They compute in
    float32; inputs and results of other float dtypes are cast."""

    kind: CellKind
    input_size: int
    hidden_size: int
    num_layers: int
    bias: bool
    batch_first: bool
    dropout: float
    bidirectional: bool
    proj_size: int
    #: Whether an exported program shows the qparams of a converted module's results.
    shows_qparams_in_export = True
    #: The number of dimensions of a batched input.
    rank = 3

    @classmethod
    def of(cls, module: nn.RNNBase) -> SequenceContract:
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

    @property
    def has_dropout(self) -> bool:
        return bool(self.dropout)

    def attributes(self) -> dict[str, Any]:
        """Return the public attributes of the float module."""
        return {name: value for name, value in vars(self).items() if name != "kind"}

    def float_module(self, float_class: type[nn.Module]) -> nn.Module:
        """Make a ``float_class`` of the same sizes."""
        options = self.attributes() | dict(self.kind.options)
        sizes = options.pop("input_size"), options.pop("hidden_size")
        if not options["proj_size"]:
            del options["proj_size"]
        return float_class(*sizes, **options)

    def suffixes(self) -> Sequence[Sequence[str]]:
        """Return the suffixes of the float module's parameter names: for each layer, one per direction."""
        directions = ("", "_reverse")[: self.num_directions]
        return [[f"_l{layer}{suffix}" for suffix in directions] for layer in range(self.num_layers)]

    def place(self, module: nn.Module, layers: list[RecurrentLayer]) -> None:
        """Register ``layers`` in ``module``, under the paths of torch.ao."""
        module.layers = nn.ModuleList(layers)
        for direction in layers[0].directions():
            direction.batch_first = self.batch_first

    def layers(self, module: nn.Module) -> list[RecurrentLayer]:
        """Return the layers of ``module``; the one layer of a cell is created on every call."""
        return [layer for layer in module.layers if isinstance(layer, RecurrentLayer)]  # type: ignore[union-attr]

    def cells(self, module: nn.Module) -> Iterator[tuple[str, CellGraphModule]]:
        """Yield (path inside the module, cell) for every layer and direction."""
        for index, layer in enumerate(self.layers(module)):
            for name, direction in zip(("layer_fw", "layer_bw"), layer.directions(), strict=False):
                yield f"layers.{index}.{name}.cell", direction.cell

    def call(
        self,
        module: Any,
        runner: Runner,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        qparams: InputQParams = None,
    ) -> tuple[Any, Any]:
        """Run ``module(*args, **kwargs)`` in every form torch.nn accepts.

        Raises:
            CustomModuleError: if the float module would refuse the arguments; names the module's path.
        """
        x, _ = self.arguments_of(module.module_path, args, kwargs)
        if isinstance(x, PackedSequence):
            x, qparams = x.data, None if qparams is None else qparams.data
        columns = column_qparams(qparams, self.input_size, x.dim() if isinstance(x, Tensor) else 0)

        def run_layers(
            x: Tensor, state: State | None, batch_sizes: list[int] | Tensor | None = None
        ) -> tuple[Tensor, State]:
            dtype, wide = x.dtype, _computes_in(module)
            x = as_dtype(x, wide)
            sizes, mask = (None, batch_sizes) if isinstance(batch_sizes, Tensor) else (batch_sizes, None)
            states = self._states(module, x, state, sizes)
            if has_no_rows(x):
                width = self.num_directions * self.output_size
                x, last = x.new_empty(*x.shape[:-1], width), states
            else:
                dropout = self.dropout if module.training else 0.0
                given = Sequences(x, columns, sizes, mask)
                x, last = runner.run_layers(self.layers(module), given, states, dropout)
            rows = zip(*last, strict=True)
            return as_dtype(x, dtype), tuple(as_dtype(torch.stack(item), dtype) for item in rows)

        return self._call_layers(module.module_path, run_layers, args, kwargs)

    def _call_layers(
        self, path: str, run_layers: RunLayers, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any]:
        x, hidden = bound_arguments(path, args, kwargs)
        if isinstance(x, PackedSequence):
            return self._call_packed(path, run_layers, x, hidden)
        self._check_input(path, x)
        batched = x.dim() == 3
        steps_first = x.unsqueeze(1) if not batched else x.transpose(0, 1) if self.batch_first else x
        state = self._given_state(path, steps_first.shape[1], hidden, batched=batched)
        output, last = run_layers(steps_first, state)
        if not batched:
            return output.squeeze(1), as_given(tuple(state.squeeze(1) for state in last))
        return (output.transpose(0, 1) if self.batch_first else output), as_given(last)

    def _call_packed(
        self, path: str, run_layers: RunLayers, packed: PackedSequence, hidden: Any
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
            self._check_values(path, x)
            # In a capture the batch sizes are data, and only the first of them, the batch size, is needed.
            batch_sizes = [int(size) for size in packed.batch_sizes] if batch is None else [batch]
            batch = batch_sizes[0]
        state = self._given_state(path, batch, hidden, batched=True)
        if state is not None and packed.sorted_indices is not None:
            state = tuple(entry[:, packed.sorted_indices] for entry in state)
        rows, last = run_layers(x, state, batch_sizes)
        if is_padded:
            rows = rows.flatten(0, 1)
        if packed.unsorted_indices is not None:
            last = tuple(item[:, packed.unsorted_indices] for item in last)
        return packed._replace(data=rows), as_given(last)

    def _check_input(self, path: str, x: Any) -> None:
        if not isinstance(x, Tensor):
            raise CustomModuleError.call_failed(path, f"the input must be a tensor, got {type(x).__name__}")
        if x.dim() not in (2, 3):
            raise CustomModuleError.call_failed(path, f"the input must have 2 or 3 dimensions, got {x.dim()}")
        self._check_values(path, x)
        if not is_exporting() and x.shape[1 if self.batch_first and x.dim() == 3 else 0] == 0:
            raise CustomModuleError.call_failed(path, "the sequence has no steps")

    def _check_values(self, path: str, x: Tensor) -> None:
        check_is_float(path, "the input", x)
        if x.shape[-1] != self.input_size:
            size = shown(x.shape)[-1]
            raise CustomModuleError.call_failed(
                path, f"the input's last dimension must be {self.input_size}, got {size}"
            )

    def _given_state(self, path: str, batch: Any, hidden: Any, *, batched: bool) -> State | None:
        """Return the states in ``hidden``, (L*D, B, width) each; None if there are none."""
        if hidden is None:
            return None
        given = zip(self.kind.states, check_state_count(self.kind, path, hidden), strict=True)
        return tuple(
            _checked_state(path, state.name, value, shape, batched)
            for (state, value), shape in zip(given, self.batched_state_shapes(batch), strict=True)
        )

    def arguments_of(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Return the input and the state of a call, or their counterparts in values of the same structure,
        such as qparams."""
        return bound_arguments(path, args, kwargs)

    def _states(
        self, module: nn.Module, x: Tensor, state: State | None, batch_sizes: list[int] | None
    ) -> list[State]:
        """Return the initial state of every layer and direction."""
        if state is not None:
            return list(zip(*(as_dtype(item, x.dtype).unbind(0) for item in state), strict=True))
        widths = self.state_widths
        first_step = x[0] if batch_sizes is None else x[: batch_sizes[0]]
        return [cell.initial_state(widths, first_step) for _, cell in self.cells(module)]

    def initial_state(self, module: nn.Module, x: Tensor, hidden: Any) -> State:
        """Return the states that a call of ``module`` with ``x`` and ``hidden`` begins with: (L*D, B, width)
        each.

        Raises:
            CustomModuleError: if the float module would refuse the state.
        """
        if hidden is not None:
            return check_state_count(self.kind, str(module.module_path), hidden)
        batched = x.dim() == 3
        rows = x.select(1 if self.batch_first else 0, 0) if batched else x[:1]
        cells = self._states(module, as_dtype(rows, _computes_in(module))[None], None, None)
        states = (as_dtype(torch.stack(item), x.dtype) for item in zip(*cells, strict=True))
        return tuple(state if batched else state.squeeze(1) for state in states)

    def state_shapes(self, x: Sequence[Any]) -> list[list[Any]]:
        """Return the shape of every state of a call whose input has the shape ``x``."""
        batched = self.batched_state_shapes(x[0 if self.batch_first else 1])
        return batched if len(x) == 3 else [[rows, width] for rows, _, width in batched]

    def output_qparams(self, module: nn.Module, results: list[Tensor]) -> tuple[QParams | None, ...]:
        """Return the qparams of the flat ``results`` of a converted module: the output and the last states,
        per-channel where layers or directions have different qparams; None for the indices of a
        PackedSequence."""
        by_state = list(zip(*(converted_qparams(cell) for _, cell in self.cells(module)), strict=True))
        last_layer = by_state[0][-self.num_directions :]
        output = combined(results[0].dim() - 1, last_layer, self.output_size)
        indices = (None,) * (len(results) - 1 - len(by_state))
        return output, *indices, *(combined(0, all_qparams, 1) for all_qparams in by_state)

    def result_groups(self) -> tuple[str, ...]:
        """Return, for each flat result, the group of parts whose dtype it has."""
        states = tuple(state.group for state in self.kind.states)
        return states[0], *states

    def fake_call(self, path: str) -> FakeCall:
        """Return a function that computes the shapes of a call's results."""

        def fake(*args: Any, **kwargs: Any) -> Any:
            return self._call_layers(path, self._fake_layers, args, kwargs)

        return fake

    def _fake_layers(
        self, x: Tensor, state: State | None, batch_sizes: list[int] | Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Run the layers on shapes only."""
        width = self.num_directions * self.output_size
        batch = batch_sizes[0] if isinstance(batch_sizes, list) else x.shape[1]
        return x.new_empty(*x.shape[:-1], width), tuple(map(x.new_empty, self.batched_state_shapes(batch)))


@dataclass(frozen=True)
class CellContract:
    """The contract of LSTMCell, GRUCell and RNNCell: one cell, called once. It computes in float32. See
    ``SequenceContract`` for its methods."""

    kind: CellKind
    input_size: int
    hidden_size: int
    bias: bool
    shows_qparams_in_export = False
    rank = 2
    batch_first = False
    has_dropout = False

    def attributes(self) -> dict[str, Any]:
        return dict(vars(self))

    def float_module(self, float_class: type[nn.Module]) -> nn.Module:
        return float_class(self.input_size, self.hidden_size, bias=self.bias, **dict(self.kind.options))

    def suffixes(self) -> Sequence[Sequence[str]]:
        return [[""]]

    def place(self, module: nn.Module, layers: list[RecurrentLayer]) -> None:
        module.cell = layers[0].layer_fw.cell

    def layers(self, module: nn.Module) -> list[RecurrentLayer]:
        return [RecurrentLayer([RecurrentDirection(self._cell(module))])]

    def cells(self, module: nn.Module) -> Iterator[tuple[str, CellGraphModule]]:
        yield "cell", self._cell(module)

    @staticmethod
    def _cell(module: nn.Module) -> CellGraphModule:
        cell = module.cell
        assert isinstance(cell, CellGraphModule)
        return cell

    def call(
        self,
        module: Any,
        runner: Runner,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        qparams: InputQParams = None,
    ) -> Any:
        input, hx = self._bind(*args, **kwargs)
        states = self.check_call(module.module_path, input, hx)
        batched = input.dim() == 2
        wide = _computes_in(module)
        x = as_dtype(input if batched else input.unsqueeze(0), wide)
        cell = self._cell(module)
        if states is None:
            states = cell.initial_state((self.hidden_size,) * len(self.kind.states), x)
        elif not batched:
            states = tuple(state.unsqueeze(0) for state in states)
        states = tuple(as_dtype(state, wide) for state in states)
        if has_no_rows(x):
            new = tuple(state.clone() for state in states)
        else:
            new = runner.run_step(cell, x, states, column_qparams(qparams, self.input_size, rank=2))
        new = tuple(as_dtype(state, input.dtype) for state in new)
        return as_given(new if batched else tuple(state.squeeze(0) for state in new))

    @staticmethod
    def _bind(input: Any, hx: Any = None) -> tuple[Any, Any]:
        return input, hx

    def arguments_of(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return self._bind(*args, **kwargs)

    def check_call(self, path: str, input: Any, hx: Any) -> tuple[Tensor, ...] | None:
        """Check the arguments of a call and return the states in ``hx``; None if there are none.

        Raises:
            CustomModuleError: if the float cell would refuse the arguments.
        """
        size = self.input_size
        if not isinstance(input, Tensor) or input.dim() not in (1, 2) or input.shape[-1] != size:
            raise CustomModuleError.call_failed(path, f"the input must be (batch, {size}) or ({size},)")
        check_is_float(path, "the input", input)
        if hx is None:
            return None
        states = check_state_count(self.kind, path, hx)
        expected = (*input.shape[:-1], self.hidden_size)
        for state, value in zip(self.kind.states, states, strict=True):
            if not isinstance(value, Tensor) or tuple(value.shape) != expected:
                result = str(shown(value.shape)) if isinstance(value, Tensor) else type(value).__name__
                raise CustomModuleError.call_failed(
                    path, f"{state.name} must have shape {shown(expected)}, got {result}"
                )
            check_is_float(path, state.name, value)
        return states

    def state_shapes(self, x: Sequence[Any]) -> list[list[Any]]:
        return [[*x[:-1], self.hidden_size] for _ in self.kind.states]

    def output_qparams(self, module: nn.Module, results: list[Tensor]) -> tuple[QParams | None, ...]:
        return converted_qparams(self._cell(module))

    def result_groups(self) -> tuple[str, ...]:
        return tuple(state.group for state in self.kind.states)

    def fake_call(self, path: str) -> FakeCall:
        def fake(input: Tensor, hx: Any = None) -> Any:
            self.check_call(path, input, hx)
            return as_given(tuple(map(input.new_empty, self.state_shapes(input.shape))))

        return fake


RecurrentContract = SequenceContract | CellContract


def contract_of(module: nn.Module) -> RecurrentContract:
    """Return the contract of a float recurrent module of torch.nn."""
    if isinstance(module, nn.RNNBase):
        return SequenceContract.of(module)
    assert isinstance(module, nn.RNNCellBase)
    return CellContract(kind_of(module), module.input_size, module.hidden_size, module.bias)


def _computes_in(module: nn.Module) -> torch.dtype:
    """Return the dtype of the float weights of ``module``, which trials and FSDP change; else float32."""
    weights = (value for name, value in module.named_parameters() if "weight" in name)
    weight = next(weights, None)
    return torch.float32 if weight is None else weight.dtype


def has_no_rows(x: Tensor) -> bool:
    """Return whether an eager ``x`` is empty: there are no values to choose dynamic qparams from."""
    return not is_compiling() and not x.numel()


# What calls have in common: their arguments, and the checks of them.


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


def _checked_state(path: str, name: str, state: Any, expected: list[Any], batched: bool) -> Tensor:
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
        widths = SequenceContract.of(module).state_widths
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
