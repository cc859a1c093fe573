"""States of our own models, loaded into fresh ones that have seen no data: equal bits, for every recurrent
kind."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import get_default_qat_qconfig_mapping, get_default_qconfig_mapping

import torchq_compat as tc
from tests.helpers.oracle import leaves
from torchq_compat.checkpoints import load_checkpoint, save_checkpoint

SEQUENCE, STEP = torch.randn(7, 3, 5), torch.randn(3, 5)


class Head(nn.Module):
    """A recurrent module, and a linear layer behind its output."""

    def __init__(self, rnn: Any) -> None:
        super().__init__()
        width = getattr(rnn, "proj_size", 0) or rnn.hidden_size
        self.rnn, self.fc = rnn, nn.Linear(width * (1 + getattr(rnn, "bidirectional", False)), 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc(leaves(self.rnn(x))[0])
        return result


class Loop(nn.Module):
    """A cell in a loop over time."""

    def __init__(self, cell: Any) -> None:
        super().__init__()
        self.cell, self.fc = cell, nn.Linear(cell.hidden_size, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape[1], self.cell.hidden_size)
        c, out = torch.zeros_like(h), []
        for t in range(x.shape[0]):
            if isinstance(self.cell, nn.LSTMCell):
                h, c = self.cell(x[t], (h, c))
            else:
                h = self.cell(x[t], h)
            out.append(h)
        result: Tensor = self.fc(torch.stack(out))
        return result


KINDS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "RNN_relu": (lambda: Head(nn.RNN(5, 6, nonlinearity="relu")), SEQUENCE),
    "LSTM_proj": (lambda: Head(nn.LSTM(5, 6, proj_size=3)), SEQUENCE),
}
for kind in (nn.LSTM, nn.GRU, nn.RNN):
    KINDS |= {
        kind.__name__: (lambda kind=kind: Head(kind(5, 6)), SEQUENCE),  # type: ignore[misc]
        f"{kind.__name__}_2_bidirectional": (
            lambda kind=kind: Head(kind(5, 6, 2, bidirectional=True)),  # type: ignore[misc]
            SEQUENCE,
        ),
        f"{kind.__name__}_without_bias": (
            lambda kind=kind: Head(kind(5, 6, bias=False, batch_first=True)),  # type: ignore[misc]
            SEQUENCE,
        ),
    }
for kind in (nn.LSTMCell, nn.GRUCell, nn.RNNCell):
    KINDS |= {
        kind.__name__: (lambda kind=kind: Head(kind(5, 6)), STEP),  # type: ignore[misc]
        f"{kind.__name__}_loop": (lambda kind=kind: Loop(kind(5, 6)), SEQUENCE),  # type: ignore[misc]
    }
DEFAULT = {("GRU_2_bidirectional", False), ("LSTMCell_loop", True)}


def prepared(name: str, seed: int, is_qat: bool) -> Any:
    torch.manual_seed(seed)
    make, x = KINDS[name]
    mapping = get_default_qat_qconfig_mapping("x86") if is_qat else get_default_qconfig_mapping("x86")
    prepare = tc.prepare_qat_fx if is_qat else tc.prepare_fx
    return prepare(make().train(is_qat), mapping, (x,), tc.get_default_prepare_custom_config())


@pytest.mark.parametrize(
    ("name", "is_qat"),
    [
        pytest.param(name, is_qat, marks=() if (name, is_qat) in DEFAULT else pytest.mark.slow)
        for name in KINDS
        for is_qat in (False, True)
    ],
)
def test_reload(name: str, is_qat: bool, tmp_path: Path) -> None:
    x, path = KINDS[name][1], tmp_path / "state.pt"
    source = prepared(name, 0, is_qat)
    for scale in (1, 2):
        source(x * scale)
    source.eval()
    config = tc.get_default_convert_custom_config()
    fresh = prepared(name, 1, is_qat).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # The fresh models have seen no data.
        lowered = [tc.convert_fx(model, config) for model in (source, fresh)]
        made = [
            (source, copy.deepcopy(fresh)),
            copy.deepcopy(tuple(model.reference for model in lowered)),
            tuple(lowered),
        ]
    for saved, loaded in made:
        before = copy.deepcopy(loaded)
        save_checkpoint(saved, path)
        load_checkpoint(path, loaded)
        with torch.no_grad():
            expected = copy.deepcopy(saved)(x)
            assert torch.equal(expected, copy.deepcopy(loaded)(x))
            assert not torch.equal(expected, before(x))
    continued = tc.convert_fx(made[0][1], config)
    with torch.no_grad():
        assert torch.equal(made[2][0](x), continued(x))


def test_there_are_17_kinds() -> None:
    assert len(KINDS) == 17
