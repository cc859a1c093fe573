"""States between calls: streams, explicit zeros, and calibrations that never saw a state."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from torchq_compat.errors import InputError
from torchq_compat.modules.parts import PartKind, part_nodes, part_of
from torchq_compat.recurrent.contracts import as_given, contract_of
from torchq_compat.support.graph_nodes import attribute_of
from torchq_compat.support.process_state import held

# States that outlive a call: while streams are active, a recurrent call begins with its last state.


#: (path of the module, index of its call in the graph)
CallKey = tuple[str, int]
State = tuple[Tensor, ...]


@dataclass
class Streams:
    """The states of the recurrent calls that keep their state.

    Attributes:
        kept: the calls that keep their state.
        states: after the last call, (L*D, B, width) each; (L*D, width) for a model without a batch.
        initial: the states before the first call.
        rows: the dimension of the streams in each state of a loop, None without one; of others it is the last
            but one.
        buffers: whether ``states`` are buffers of a program that is being exported, written in place.
    """

    kept: frozenset[CallKey]
    states: dict[CallKey, State] = field(default_factory=dict)
    initial: dict[CallKey, State] = field(default_factory=dict)
    rows: Mapping[CallKey, tuple[int | None, ...]] = field(default_factory=dict)
    buffers: bool = False

    def active(self) -> AbstractContextManager[None]:
        """Make recurrent modules use these streams inside the ``with`` block."""
        return held(_ACTIVE, self)

    def call(self, key: CallKey, begin: Callable[[], State], run: Callable[[State], Any]) -> Any:
        """Run a kept call from its kept state, or from ``begin()`` the first time, and keep its last state.

        Args:
            run: state -> (output, last state); the last state is a tuple, or the tensor if there is only one.

        Raises:
            InputError: if the number of streams differs from the last call's.
        """
        first = begin()
        state = self.states.get(key)
        if state is None:
            state = self.initial[key] = first
        elif (kept := self._count(key, state)) != (given := self._count(key, first)):
            raise InputError.of("TQ901.other_streams", given=given, kept=kept)
        result = run(state)
        last = result[1] if isinstance(result[1], tuple) else (result[1],)
        if self.buffers:
            for buffer, new in zip(self.states[key], last, strict=True):
                buffer.copy_(new)
        else:
            self.states[key] = tuple(item.detach() for item in last)
        return result

    def reset(self, indices: Sequence[int] | Tensor | None = None) -> None:
        """Restore the initial states of all streams, or of those at ``indices`` in the batch.

        Raises:
            InputError: if there is no such stream.
        """
        if indices is None:
            self.states.clear()
            self.initial.clear()
            return
        given = torch.as_tensor(indices)
        is_mask = given.dtype is torch.bool
        rows = (given.nonzero() if is_mask else given).reshape(-1).long()
        for key, state in self.states.items():
            count = self._count(key, state)
            if is_mask and given.shape != (count,):
                raise _no_such_stream(given.tolist(), count)
            if rows.numel() and (int(rows.max()) >= count or int(rows.min()) < -count):
                raise _no_such_stream(rows.tolist(), count)
        for key, state in self.states.items():
            self.states[key] = tuple(
                _with_rows(item, first, rows, dim)
                for item, first, dim in zip(state, self.initial[key], self._dims(key, state), strict=True)
            )

    def _dims(self, key: CallKey, state: State) -> tuple[int | None, ...]:
        return self.rows.get(key, (-2,) * len(state))

    def _count(self, key: CallKey, state: State) -> int:
        """Return the number of streams; 0 where no state has any."""
        pairs = zip(state, self._dims(key, state), strict=True)
        return next((item.shape[dim] for item, dim in pairs if dim is not None), 0)


_ACTIVE: ContextVar[Streams | None] = ContextVar("torchq_compat_streams", default=None)


def active_streams() -> Streams | None:
    """Return the active streams; None outside of a streaming model."""
    return _ACTIVE.get()


def _with_rows(state: Tensor, first: Tensor, rows: Tensor, dim: int | None) -> Tensor:
    if dim is None:
        return state  # The same for all streams, which go on.
    rows = rows.to(state.device) % state.shape[dim]
    return state.index_copy(dim, rows, first.index_select(dim, rows))


def _no_such_stream(given: object, count: int) -> InputError:
    return InputError.of("TQ901.no_such_stream", given=given, count=count, last=count - 1)


# Detects a calibration that has never seen a hidden state.
#
# The first step of a sequence begins with zeros. In a module calibrated only with single steps, the
# observers of the hidden projection have seen only its bias: every later step saturates, and SQNR falls to
# a few dB.


GROUP = "hgates"


def has_seen_no_hidden_state(cells: Iterable[GraphModule]) -> bool:
    """Return whether every hidden projection of the prepared ``cells`` has observed only its bias, or read
    only zeros.

    False if the observers cannot show it: they keep no range, or have seen no data.
    """
    result = [
        _reads_zeros(cell, node) or _is_bias_alone(cell, node)
        for cell in cells
        for _, node in part_nodes(cell)
        if part_of(node).group == GROUP and part_of(node).kind is PartKind.LINEAR
    ]
    return bool(result) and all(result)


def _reads_zeros(cell: GraphModule, node: Node) -> bool:
    """Return whether the projection's input has its own observer, and that observer has seen only zeros."""
    source = node.args[0]
    return isinstance(source, Node) and _observed_range(cell, source) == (0.0, 0.0)


def _is_bias_alone(cell: GraphModule, node: Node) -> bool:
    ranges = ((user, item) for user in node.users if (item := _observed_range(cell, user)) is not None)
    if (observed := next(ranges, None)) is None:
        return False
    bias = node.args[2] if len(node.args) > 2 else None
    values = torch.zeros(1)
    if isinstance(bias, Node) and bias.op == "get_attr":
        values = attribute_of(cell, bias).detach()
    user, (low, high) = observed
    scale = float(values.abs().max()) or 1.0
    if abs(low - float(values.min())) > 1e-6 * scale or abs(high - float(values.max())) > 1e-6 * scale:
        return False
    # Later steps may lie inside of the bias's range: a histogram shows other values than its.
    histogram = getattr(_observer(cell, user), "histogram", None)
    if not isinstance(histogram, Tensor) or low == high:
        return True
    of_bias = torch.histc(values.to(histogram), len(histogram), low, high)
    return not bool(((histogram > 0) & (of_bias == 0)).any())


def _observer(cell: GraphModule, user: Node) -> Any:
    observer = cell.get_submodule(str(user.target))
    return getattr(observer, "activation_post_process", observer)


def _observed_range(cell: GraphModule, user: Node) -> tuple[float, float] | None:
    if user.op != "call_module":
        return None
    observer = _observer(cell, user)
    low, high = getattr(observer, "min_val", None), getattr(observer, "max_val", None)
    if not isinstance(low, Tensor) or not isinstance(high, Tensor) or low.numel() != 1 or high.numel() != 1:
        return None
    return (float(low), float(high)) if torch.isfinite(low) and torch.isfinite(high) else None


# Explicit initial states, zeros, for calls of torch.nn's recurrent modules that pass none.


def give_initial_states(module: nn.Module) -> None:
    """Make every call of ``module``, in the package's copy of the model, pass initial states."""
    module.register_forward_pre_hook(_with_states, with_kwargs=True)


def _with_states(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = args[1] if len(args) > 1 else kwargs.get("hx")
    x = args[0] if args else kwargs.get("input")
    if given is not None or not isinstance(x, Tensor):
        return None
    return (x, as_given(tuple(map(x.new_zeros, contract_of(module).state_shapes(x.shape))))), {}
