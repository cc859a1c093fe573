"""What several tests use of ``test_native_edges``: Whole, get_default_qconfig_mapping."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class Whole(nn.Module):
    def __init__(self, rnn: nn.Module) -> None:
        super().__init__()
        self.rnn = rnn

    def forward(self, x: Tensor) -> Any:
        return self.rnn(x)
