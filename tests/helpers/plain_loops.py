"""The oracle of converted recurrent models: each recurrent module as a Python loop over the float weights,
which fake-quantizes the same parts with the same qparams."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import torchq_compat as tc
from tests.helpers.oracle import leaves, sqnr
from torchq_compat.capture.opaque_calls import OpaqueModule

__all__ = ["check_against_plain_loops", "with_plain_loops"]

#: In dB: the least that is required if the plain loop reaches it, and how far below the loop a result may be.
LEAST, BELOW_THE_LOOP = 25.0, 1.0
#: In dB: more than any module with 8-bit parts reaches.
TOO_GOOD = 70.0
State = tuple[Tensor, ...]


def check_against_plain_loops(
    exact: Any, found: Any, looped: Any, *, of_data: Callable[[Tensor], Tensor] = lambda value: value
) -> None:
    """Assert that every tensor of ``found`` is as near to ``exact`` as the result of the plain loops.

    Args:
        of_data: selects what is compared of a tensor, say without its padding.
    """
    results = [leaves(each) for each in (exact, found, looped)]
    for index, (a, b, c) in enumerate(zip(*results, strict=True)):
        assert a.shape == b.shape == c.shape, index
        if not a.is_floating_point():
            assert torch.equal(a, b), index
            continue
        here, there = sqnr(of_data(a), of_data(b)), sqnr(of_data(a), of_data(c))
        assert there - BELOW_THE_LOOP < here < TOO_GOOD, (index, here, there)
        assert here >= LEAST or there < LEAST, (index, here, there)


def with_plain_loops(reference: nn.Module, model: nn.Module) -> nn.Module:
    """Return a copy of ``reference``, which an x86 mapping made from ``model``, with plain loops."""
    oracle = copy.deepcopy(reference)
    qparams = {d.path: d.details for d in tc.explain(reference) if "scale" in d.details}
    replaced = 0
    for path, module in oracle.named_modules():
        if not isinstance(module, OpaqueModule):
            continue
        # Modules in the step of a Python loop keep their paths in the model.
        where = re.sub(r"^loop(_\d+)?\.step\.", "", path)
        found = model.get_submodule(where) if "loop" not in where else None
        if isinstance(found, (nn.RNNBase, nn.RNNCellBase)):
            plain = _PlainLoop(found, module, where, qparams)
            module.opaque_call_from_graph = plain  # type: ignore[method-assign]
            replaced += 1
    assert replaced
    return oracle


class _PlainLoop:
    def __init__(
        self, module: nn.RNNBase | nn.RNNCellBase, converted: nn.Module, path: str, qparams: Mapping[str, Any]
    ) -> None:
        self.module, self.path, self.qparams = module, path, qparams
        self.states = converted.state_dict()
        # The bases of a subclass, and of the class that a parametrization makes, include torch's class.
        names = [base.__name__.removesuffix("Cell") for base in type(module).mro()]
        self.kind = next(name for name in names if name in _STEPS)

    def __call__(self, _layout: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x, hidden = (*args, *kwargs.values(), None)[:2]
        if isinstance(self.module, nn.RNNCellBase):
            last = self._step("cell", self._weights("", "cell"), x, self._given(hidden, x, 0))
            return self._as_given(last)
        if isinstance(x, PackedSequence):
            padded, lengths = pad_packed_sequence(PackedSequence(x.data, x.batch_sizes))
            state = self._given(hidden, padded, 1)
            if x.sorted_indices is not None and hidden is not None:
                state = tuple(each[:, x.sorted_indices] for each in state)
            output, last = self._layers(padded, state, lengths)
            if x.unsorted_indices is not None:
                last = tuple(each[:, x.unsorted_indices] for each in last)
            return x._replace(data=pack_padded_sequence(output, lengths).data), self._as_given(last)
        is_batched = x.dim() == 3
        swaps = self.module.batch_first and is_batched
        steps_first = x.transpose(0, 1) if swaps else x if is_batched else x.unsqueeze(1)
        if hidden is not None and not is_batched:
            hidden = tuple(each.unsqueeze(1) for each in self._pair(hidden))
        lengths = torch.full((steps_first.size(1),), steps_first.size(0))
        output, last = self._layers(steps_first, self._given(hidden, steps_first, 1), lengths)
        if not is_batched:
            return output.squeeze(1), self._as_given(tuple(each.squeeze(1) for each in last))
        return (output.transpose(0, 1) if swaps else output), self._as_given(last)

    @staticmethod
    def _pair(hidden: Any) -> State:
        return tuple(hidden) if isinstance(hidden, (tuple, list)) else (hidden,)

    @staticmethod
    def _as_given(state: State) -> Any:
        return state if len(state) > 1 else state[0]

    def _given(self, hidden: Any, x: Tensor, batch_dim: int) -> State:
        if hidden is not None:
            return self._pair(hidden)
        module: Any = self.module
        width = module.hidden_size
        widths = [getattr(module, "proj_size", 0) or width, width][: 2 if self.kind == "LSTM" else 1]
        if isinstance(module, nn.RNNCellBase):
            return tuple(x.new_zeros(*x.shape[:-1], each) for each in widths)
        rows = module.num_layers * (2 if module.bidirectional else 1)
        return tuple(x.new_zeros(rows, x.size(batch_dim), each) for each in widths)

    def _layers(self, x: Tensor, state: State, lengths: Tensor) -> tuple[Tensor, State]:
        module: Any = self.module
        names = ["", "_reverse"] if module.bidirectional else [""]
        lasts = []
        for layer in range(module.num_layers):
            outputs = []
            for suffix in names:
                cell = f"layers.{layer}.layer_{'bw' if suffix else 'fw'}.cell"
                first = tuple(each[len(lasts)] for each in state)
                weights = self._weights(f"_l{layer}{suffix}", cell)
                output, last = self._direction(cell, weights, x, first, lengths, backward=bool(suffix))
                outputs.append(output)
                lasts.append(last)
            x = torch.cat(outputs, -1)
        return x, tuple(torch.stack(each) for each in zip(*lasts, strict=True))

    def _direction(
        self, cell: str, weights: list[Any], x: Tensor, state: State, lengths: Tensor, *, backward: bool
    ) -> tuple[Tensor, State]:
        outputs: list[Any] = [None] * x.size(0)
        for t in reversed(range(x.size(0))) if backward else range(x.size(0)):
            new = self._step(cell, weights, x[t], state)
            runs = (t < lengths)[:, None]
            state = tuple(torch.where(runs, *pair) for pair in zip(new, state, strict=True))
            outputs[t] = new[0]
        return torch.stack(outputs), state

    def _weights(self, suffix: str, cell: str) -> list[Any]:
        """Return W_ih, W_hh, b_ih, b_hh and, if projected, W_hr; matrices are fake-quantized per channel."""
        found: list[Any] = []
        names = ["weight_ih", "weight_hh", *(["weight_hr"] if getattr(self.module, "proj_size", 0) else [])]
        for index, name in enumerate(names):
            weight = getattr(self.module, name + suffix).detach()
            scale = self.states[f"{cell}._scale_{index}"]
            zero_point = self.states[f"{cell}._zero_point_{index}"]
            assert len(scale) == len(weight)
            quantized = torch.fake_quantize_per_channel_affine(
                weight.float(), scale, zero_point.to(torch.int32), 0, -128, 127
            )
            found.append(quantized.to(weight.dtype))
        biases = [getattr(self.module, name + suffix, None) for name in ("bias_ih", "bias_hh")]
        return [*found[:2], *biases, *found[2:]]

    def _step(self, cell: str, weights: list[Any], x: Tensor, state: State) -> State:
        def q(part: str, value: Tensor) -> Tensor:
            details = self.qparams.get(f"{self.path}.{cell}.{part}")
            if details is None:
                return value
            info = torch.iinfo(details["dtype"])
            return torch.fake_quantize_per_tensor_affine(
                value, details["scale"], details["zero_point"], info.min, info.max
            )

        w_ih, w_hh, b_ih, b_hh, *w_hr = weights
        # In a float64 model dequantized weights are float32.
        x, state = x.to(w_ih.dtype), tuple(each.to(w_ih.dtype) for each in state)
        i = q("igates", nn.functional.linear(x, w_ih, None if b_ih is None else b_ih.detach()))
        h = q("hgates", nn.functional.linear(state[0], w_hh, None if b_hh is None else b_hh.detach()))
        return _STEPS[self.kind](self.module, q, i, h, state, w_hr)


def _lstm(_: Any, q: Any, i: Tensor, h: Tensor, state: State, w_hr: Sequence[Tensor]) -> State:
    gates = q("gates", i + h).chunk(4, -1)
    names = ("input_gate", "forget_gate", "cell_gate", "output_gate")
    into, forget, new, out = (
        q(name, torch.tanh(gate) if name == "cell_gate" else torch.sigmoid(gate))
        for name, gate in zip(names, gates, strict=True)
    )
    c = q("fgate_cx_igate_cgate", q("fgate_cx", forget * state[1]) + q("igate_cgate", into * new))
    hy = q("ogate_cy", out * q("tanh_cy", torch.tanh(c)))
    return (q("projection", nn.functional.linear(hy, w_hr[0])) if w_hr else hy), c


def _gru(_: Any, q: Any, i: Tensor, h: Tensor, state: State, _hr: Any) -> State:
    (ir, iz, new_i), (hr, hz, new_h) = i.chunk(3, -1), h.chunk(3, -1)
    reset, update = q("gates", torch.cat([ir + hr, iz + hz], -1)).chunk(2, -1)
    r, z = q("reset_gate", torch.sigmoid(reset)), q("update_gate", torch.sigmoid(update))
    n = q("new_gate", torch.tanh(q("igate_rgate_hgate", new_i + q("rgate_hgate", r * new_h))))
    return (q("hy", q("kgate_ngate", q("keep_gate", 1 - z) * n) + q("zgate_hx", z * state[0])),)


def _rnn(module: Any, q: Any, i: Tensor, h: Tensor, _state: State, _hr: Any) -> State:
    if module.nonlinearity == "relu":
        return (q("hy", torch.relu(i + h)),)
    return (q("hy", torch.tanh(q("gates", i + h))),)


_STEPS: dict[str, Callable[..., State]] = {"LSTM": _lstm, "GRU": _gru, "RNN": _rnn}
