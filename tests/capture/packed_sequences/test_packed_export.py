"""Packed sequences in exported programs: the bits of the converted model, at any length and batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence

import torchq_compat as tc
from tests.capture.packed_sequences.test_packed_models import (
    MODELS,
    Tagger,
    converted,
    sequences,
    unpacked,
)
from tests.helpers.histograms import coarse_qconfig_mapping
from tests.helpers.once import made_once
from tests.helpers.oracle import calibrate, leaves
from tests.helpers.packed_models import PackedShape, Packs, map_all
from torchq_compat.errors import ExportError

MAPPING = coarse_qconfig_mapping("x86")


BOTH_DIRECTIONS = PackedShape("LSTM", 2, True, True, False, with_state=True, ops_on_rows=True)
SORTED = PackedShape("GRU", 1, False, False, True, total_length=True)


@made_once
def converted_packs(shape: PackedShape) -> tuple[Packs, Any]:
    torch.manual_seed(0)
    model = Packs(shape).eval()
    prepared = tc.prepare_fx(model, MAPPING, model.sequences(4, 7), map_all())
    calibrate(prepared, [model.sequences(5, 9) for _ in range(3)])
    return model, tc.convert_to_reference_fx(prepared)


@pytest.mark.parametrize("shape", [BOTH_DIRECTIONS, SORTED], ids=str)
def test_rolled_programs(shape: PackedShape) -> None:
    model, converted = converted_packs.itself(shape)
    program = tc.export(converted, model.sequences(4, 7)).module()
    for given in (model.sequences(5, 9), model.sequences(2, 12, [12, 3]), model.sequences(3, 8, [5, 5, 1])):
        for wanted, found in zip(leaves(converted(*given)), leaves(program(*given)), strict=True):
            assert torch.equal(wanted, found)


@pytest.mark.slow
def test_unrolled_programs() -> None:
    model, converted = converted_packs.itself(PackedShape("LSTM", 1, True, True, False, ops_on_rows=True))
    program = tc.export(converted, model.sequences(4, 7), recurrent="unrolled").module()
    for given in (model.sequences(4, 7, [7, 5, 5, 1]), model.sequences(3, 7, [7, 2, 1])):
        for wanted, found in zip(leaves(converted(*given)), leaves(program(*given)), strict=True):
            assert torch.equal(wanted, found)


def test_models() -> None:
    _, reference, _ = converted.itself("results")
    program = tc.export(reference, sequences(4, 7)).module()
    # The last example has padding behind its longest sequence.
    for given in (sequences(6, 9), sequences(2, 12), (torch.randn(2, 9, 6), torch.tensor([5, 3]))):
        results = zip(MODELS["results"], reference(*given), program(*given), strict=True)
        for forward, *of_forms in results:
            for wanted, found in zip(*map(leaves, of_forms), strict=True):
                assert torch.equal(wanted, found), forward.__name__


def test_the_opaque_shape_is_refused() -> None:
    model, converted = converted_packs.itself(SORTED)
    with pytest.raises(ExportError, match=r"opaque.*lengths") as caught:
        tc.export(converted, model.sequences(4, 7), recurrent="opaque")
    assert "rolled" in str(caught.value)


@pytest.mark.slow
def test_executorch() -> None:
    pytest.importorskip("executorch")

    def same_length(model: Any, x: torch.Tensor, lengths: torch.Tensor) -> Any:
        output, (h, _) = model.rnn(pack_padded_sequence(x, lengths, batch_first=True))
        return unpacked(output, total_length=x.size(1)), h

    torch.manual_seed(0)
    prepared = tc.prepare_fx(Tagger(same_length).eval(), MAPPING, sequences(4, 7), map_all())
    calibrate(prepared, [sequences(5, 9) for _ in range(3)])
    converted = tc.convert_to_reference_fx(prepared)
    program = tc.to_executorch(converted, sequences(5, 12))
    for given in (sequences(5, 12), sequences(3, 8)):
        for wanted, found in zip(leaves(converted(*given)), leaves(program(*given)), strict=True):
            assert torch.equal(wanted, found)
