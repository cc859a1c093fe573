"""Public models that pack their sequences: quantized, at lengths and batches they were not prepared for."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.ao.quantization.quantize_fx as fx
from torch import nn
from torch.ao.quantization import get_default_qconfig_mapping

import torchq_compat as tc
from tests.helpers.oracle import calibrate, leaves, sqnr
from tests.helpers.packed_models import map_all
from tests.helpers.plain_loops import check_against_plain_loops, with_plain_loops
from tests.zoo.packed import PACKED_ZOO, PackedEntry
from tests.zoo.sane_statistics import settle
from torchq_compat.support.decisions import Action


@pytest.mark.parametrize(
    "entry",
    [
        PACKED_ZOO[0],
        *(pytest.param(entry, marks=pytest.mark.slow) for entry in PACKED_ZOO[1:]),
    ],
    ids=lambda entry: entry.name,
)
def test_packed_model(entry: PackedEntry) -> None:
    torch.manual_seed(0)
    model = entry.make().eval()
    settle(model, [entry.batch(32, 12)])
    prepared = tc.prepare_fx(model, get_default_qconfig_mapping("x86"), entry.batch(4, 7), map_all())
    calibrate(prepared, [entry.batch(8, 11) for _ in range(4)])
    reference, lowered = tc.convert_to_reference_fx(prepared), tc.convert_fx(prepared)
    recurrent = [name for name, module in model.named_modules() if isinstance(module, nn.RNNBase)]
    assert len(recurrent) == entry.recurrent
    for name in recurrent:
        assert tc.explain(reference).find(name)[0].action is Action.QUANTIZED
        assert any(
            v.dtype is torch.int8 for k, v in reference.state_dict().items() if k.startswith(f"{name}.")
        )
    for batch, length in ((3, 15), (7, 5), (1, 9)):
        given = entry.batch(batch, length)
        exact, found, fast = (leaves(m(*given)) for m in (model, reference, lowered))
        check_against_plain_loops(exact, found, with_plain_loops(reference, model)(*given))
        assert all(sqnr(b, c) > 35 for b, c in zip(found, fast, strict=True))


def test_fx_takes_none_of_them() -> None:
    mapping = get_default_qconfig_mapping("x86")
    for entry in PACKED_ZOO:
        model, example = copy.deepcopy(entry.make().eval()), entry.batch(4, 7)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises((TypeError, RuntimeError, ValueError, AttributeError)):
                fx.prepare_fx(model, mapping, example)
