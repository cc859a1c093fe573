"""Float recurrent modules that stay float: one opaque call, so that no sequence length is fixed.

torch.export cannot capture a bare ``nn.LSTM`` with a dynamic sequence length.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from torchq_compat.custom_modules.leaf_op import FakeCall

__all__ = ["fake_rnn"]


def fake_rnn(module: nn.RNNBase) -> FakeCall:
    """Shapes of ``nn.GRU`` and ``nn.RNN``: output (T, B, D*H) in the input's layout, h_n (L*D, B, H)."""
    directions = 2 if module.bidirectional else 1

    def fake(input: Tensor, hx: Any = None) -> tuple[Tensor, Tensor]:
        output = input.new_empty(*input.shape[:-1], directions * module.hidden_size)
        rows = module.num_layers * directions
        if input.dim() == 2:
            return output, input.new_empty(rows, module.hidden_size)
        batch = input.shape[0 if module.batch_first else 1]
        return output, input.new_empty(rows, batch, module.hidden_size)

    return fake
