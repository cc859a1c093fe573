"""Explicit initial states, zeros, for calls of torch.nn's recurrent modules that pass none."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

__all__ = ["give_initial_states"]


def give_initial_states(module: nn.Module) -> None:
    """Make every call of ``module``, in the package's copy of the model, pass initial states."""
    module.register_forward_pre_hook(_with_states, with_kwargs=True)


def _with_states(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = args[1] if len(args) > 1 else kwargs.get("hx")
    x = args[0] if args else kwargs.get("input")
    if given is not None or not isinstance(x, Tensor):
        return None
    states = [x.new_zeros(shape) for shape in _shapes(module, x)]
    return (x, states[0] if len(states) == 1 else tuple(states)), {}


def _shapes(module: Any, x: Tensor) -> list[tuple[Any, ...]]:
    count = 2 if isinstance(module, (nn.LSTM, nn.LSTMCell)) else 1
    if not isinstance(module, nn.RNNBase):
        return [(*x.shape[:-1], module.hidden_size)] * count
    rows = module.num_layers * (2 if module.bidirectional else 1)
    batch = () if x.dim() == 2 else (x.shape[0 if module.batch_first else 1],)
    hidden = (rows, *batch, module.proj_size or module.hidden_size)
    return [hidden, (rows, *batch, module.hidden_size)][:count]
