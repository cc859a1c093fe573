"""Contracts of recurrent modules: how a module is called, which cells it holds, how a runner runs them.

``SequenceContract`` is the contract of LSTM, GRU and RNN. ``CellContract``, that of their cells, has the same
methods.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from torchq_compat.capture.opaque_stub import FakeCall
from torchq_compat.errors import CustomModuleError
from torchq_compat.modules.parts import converted_qparams
from torchq_compat.read.qparams import QParams, combined
from torchq_compat.recurrent.cell_graph import CellGraphModule
from torchq_compat.recurrent.cells import CellKind, kind_of
from torchq_compat.recurrent.contract import (
    RecurrentStructure,
    State,
    as_given,
    bound_arguments,
    call_recurrent,
    check_is_float,
    check_state_count,
    fake_layers,
    shown,
)
from torchq_compat.recurrent.kernel.program import ColumnQParams, column_qparams
from torchq_compat.recurrent.over_time import RecurrentDirection, RecurrentLayer
from torchq_compat.recurrent.runners import Runner, Sequences
from torchq_compat.support.dtypes import as_dtype
from torchq_compat.support.process_state import is_compiling

#: The qparams of the input, in the structure in which a call passes the input; None if they are not known.
InputQParams = Any


@dataclass(frozen=True)
class SequenceContract(RecurrentStructure):
    """The contract of LSTM, GRU and RNN: layers over time. They compute in float32; inputs and results of
    other float dtypes are cast."""

    #: Whether an exported program shows the qparams of a converted module's results.
    shows_qparams_in_export = True
    #: The number of dimensions of a batched input.
    rank = 3

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
        run_layers = partial(self._run_layers, module, runner, columns)
        return call_recurrent(self, module.module_path, run_layers, args, kwargs)

    def arguments_of(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Return the input and the state of a call, or their counterparts in values of the same structure,
        such as qparams."""
        return bound_arguments(path, args, kwargs)

    def _run_layers(
        self,
        module: Any,
        runner: Runner,
        columns: ColumnQParams,
        x: Tensor,
        state: State | None,
        batch_sizes: list[int] | Tensor | None = None,
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
        return as_dtype(x, dtype), tuple(
            as_dtype(torch.stack(rows), dtype) for rows in zip(*last, strict=True)
        )

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
            return call_recurrent(self, path, fake_layers(self), args, kwargs)

        return fake


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
