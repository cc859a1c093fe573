"""Packed sequences inside a model: equal to float wherever float is defined, with untouched padding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import (
    FusedMovingAvgObsFakeQuantize,
    MovingAverageMinMaxObserver,
    QConfig,
    QConfigMapping,
    default_fused_per_channel_wt_fake_quant,
    disable_observer,
)

import torchq_compat as tc
from tests.helpers.histograms import coarse_qconfig_mapping
from tests.helpers.oracle import calibrate, leaves, sqnr
from tests.helpers.packed_models import PADDING, PackedShape, Packs, map_all, random_shapes
from tests.helpers.plain_loops import check_against_plain_loops, with_plain_loops
from torchq_compat.capture.trial_runs import run_prepared

MAPPING = coarse_qconfig_mapping("x86")


@pytest.mark.parametrize(
    "shape",
    [
        *random_shapes(3, seed=19),
        *(pytest.param(shape, marks=pytest.mark.slow) for shape in random_shapes(24, seed=20)),
    ],
    ids=str,
)
def test_packed_sequences(shape: PackedShape) -> None:
    torch.manual_seed(0)
    model = Packs(shape).eval()
    for parameter in model.rnn.parameters():
        parameter.data *= 2.0
    prepared = tc.prepare_fx(model, MAPPING, model.sequences(4, 7), map_all())
    for batch, steps in ((5, 9), (1, 4), (3, 1)):
        given = model.sequences(batch, steps)
        wanted = leaves(model(*given))
        found = leaves(run_prepared(prepared, given))
        for exact, observed in zip(wanted, found, strict=True):
            assert exact.shape == observed.shape
            assert torch.allclose(exact, observed, atol=1e-5)
    calibrate(prepared, [model.sequences(6, 9) for _ in range(3)])
    reference, lowered = tc.convert_to_reference_fx(prepared), tc.convert_fx(prepared)
    given = model.sequences(5, 11, [11, 11, 4, 1, 1])
    exact, found, fast = (leaves(each(*given)) for each in (model, reference, lowered))
    is_padding = exact[0] == PADDING
    assert is_padding.any()
    assert torch.equal(found[0] == PADDING, is_padding)
    assert torch.equal(exact[-1], found[-1])
    steps = (~is_padding)[..., :1]
    looped = leaves(with_plain_loops(reference, model)(*given))
    check_against_plain_loops(
        *([each[0] * steps, each[1] * steps, *each[2:]] for each in (exact, found, looped))
    )
    assert all(torch.equal(a, b) for a, b in zip(found, fast, strict=True))


def test_calibration_never_sees_padding() -> None:
    torch.manual_seed(0)
    shape = PackedShape("LSTM", 1, True, True, False)
    model = Packs(shape).eval()
    states = []
    for padding in (0.0, 1e6):
        torch.manual_seed(1)
        batches = [model.sequences(6, 5) for _ in range(2)]
        for x, lengths in batches:
            x[torch.arange(5) >= lengths[:, None]] = padding
        prepared = tc.prepare_fx(model, MAPPING, batches[0], map_all())
        calibrate(prepared, batches)
        states.append(tc.convert_to_reference_fx(prepared).state_dict())
    for name, value in states[0].items():
        assert str(value) == str(states[1][name]), name


def test_training() -> None:
    torch.manual_seed(0)
    model = Packs(PackedShape("LSTM", 1, False, True, False, ops_on_rows=True)).train()
    given, target = model.sequences(12, 9), torch.randn(12, 4)

    def loss_of(trained: nn.Module) -> Tensor:
        output = trained(*given)[1]
        return (output[torch.arange(12), given[1] - 1] - target).square().mean()

    prepared = tc.prepare_qat_fx(model, of_the_last_step(), given, map_all())
    for each in (model, prepared):
        loss_of(each).backward()
    trained = dict(prepared.named_parameters())
    for name, parameter in model.named_parameters():
        own = name
        if name.startswith("rnn."):
            kind, gates = name.removeprefix("rnn.").split("_")[:2]
            own = f"rnn.layers.0.layer_fw.cell.{gates[0]}gates.{kind}"
        # Ranges that include a step's values clip nothing: the gradients are the float model's.
        cosine = torch.cosine_similarity(parameter.grad.flatten(), trained[own].grad.flatten(), 0)
        assert cosine > 0.99, (name, float(cosine))
    optimizer, losses = torch.optim.Adam(prepared.parameters(), 2e-2), []
    for _ in range(25):
        optimizer.zero_grad()
        loss = loss_of(prepared)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < 0.6 * losses[0]
    # Otherwise the observers move on, even in evaluation.
    prepared.eval().apply(disable_observer)
    reference, lowered = tc.convert_to_reference_fx(prepared), tc.convert_fx(prepared)
    weights = [name for name, value in reference.state_dict().items() if value.dtype is torch.int8]
    assert sum(name.startswith("rnn.") for name in weights) == 2
    trained_results, found, fast = (leaves(each(*given)) for each in (prepared, reference, lowered))
    assert sqnr(trained_results[1], found[1]) > 45
    assert all(torch.equal(a, b) for a, b in zip(found, fast, strict=True))


def of_the_last_step() -> QConfigMapping:
    """Return fake-quantizes whose range is that of the current values. Those of the default mapping follow by
    a hundredth, so values of the first steps are clipped and the loss falls by half as much."""
    activation = FusedMovingAvgObsFakeQuantize.with_args(
        observer=MovingAverageMinMaxObserver, quant_min=0, quant_max=255, averaging_constant=1.0
    )
    return QConfigMapping().set_global(QConfig(activation, default_fused_per_channel_wt_fake_quant))
