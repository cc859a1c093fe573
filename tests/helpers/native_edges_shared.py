"""Helpers shared by ``test_native_edges`` and other tests of the cell loop."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class Whole(nn.Module):
    def __init__(self, rnn: nn.Module) -> None:
        super().__init__()
        self.rnn = rnn

    def forward(self, x: Tensor) -> Any:
        return self.rnn(x)
