"""Quantization-aware training and the life of a model: train, switch, checkpoint, resume, average, share."""

from __future__ import annotations

import copy
import gc
import os
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.ao.quantization.quantize_fx as fx
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.nn.intrinsic.qat import freeze_bn_stats, update_bn_stats
from torch.ao.quantization import (
    FakeQuantizeBase,
    MinMaxObserver,
    QConfig,
    QConfigMapping,
    default_weight_observer,
    disable_fake_quant,
    disable_observer,
    enable_fake_quant,
    enable_observer,
    get_default_qat_qconfig_mapping,
    get_default_qconfig_mapping,
    get_observer_state_dict,
    load_observer_state_dict,
)
from torch.optim.swa_utils import AveragedModel

import torchq_compat as tc
from tests.helpers.once import made_once
from tests.helpers.oracle import MAP_LSTM, activation_qparams, calibrate, fx_activation_qparams, sqnr
from tests.helpers.training import SHAPES, ConvNet, SequenceNet, prepare
from torchq_compat.checkpoints import load_checkpoint, save_checkpoint
from torchq_compat.errors import CheckpointError, ConvertError, QuantizationWarning
from torchq_compat.nn.intrinsic import qat
from torchq_compat.port.running.redirections import training_as_fx


def train(
    prepared: nn.Module,
    make: type[nn.Module],
    steps: int,
    first: int = 0,
    optimizer: torch.optim.Optimizer | None = None,
) -> list[float]:
    """Return the losses of ``steps`` steps of SGD on batches that depend only on the step's number."""
    optimizer = optimizer or torch.optim.SGD(prepared.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(first, first + steps):
        torch.manual_seed(100 + step)
        x, y = torch.randn(SHAPES[make]), torch.randint(0, 3, (SHAPES[make][0],))
        optimizer.zero_grad()
        loss = F.cross_entropy(prepared(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize("backend", ["qnnpack", "x86"])
def test_ten_steps_have_the_losses_and_qparams_of_fx(backend: str) -> None:
    torch.manual_seed(0)
    model = ConvNet().train()
    mapping, example = get_default_qat_qconfig_mapping(backend), (torch.randn(SHAPES[ConvNet]),)
    ours = tc.prepare_qat_fx(model, mapping, example)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = fx.prepare_qat_fx(copy.deepcopy(model), mapping, example)
    mine, fx_losses = train(ours, ConvNet, 10), train(theirs, ConvNet, 10)
    assert mine == pytest.approx(fx_losses, rel=1e-4)
    assert mine[0] != mine[-1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference = fx.convert_to_reference_fx(theirs.eval())
    converted = tc.convert_to_reference_fx(ours)
    rounded = [
        {(round(s, 6), z) for s, z in found}
        for found in (activation_qparams(converted), fx_activation_qparams(reference))
    ]
    assert rounded[0] == rounded[1]


@pytest.mark.parametrize("backend", ["qnnpack", "x86"])
@pytest.mark.parametrize("make", [ConvNet, SequenceNet])
def test_converted_equals_the_trained_fake_quantized_model(make: type[nn.Module], backend: str) -> None:
    prepared = prepare(make, backend)
    losses = train(prepared, make, 15)
    assert min(losses[-3:]) < losses[0]
    prepared.apply(disable_observer).eval()
    converted = tc.convert_fx(prepared)
    x = torch.randn(64, *SHAPES[make][1:])
    with torch.no_grad():
        assert sqnr(prepared(x), converted(x)) > 30
        prepared.apply(disable_fake_quant)
        assert sqnr(prepared(x), converted(x)) < 60


def test_legacy_switches_reach_every_fake_quantize() -> None:
    prepared = prepare(SequenceNet)
    found = [m for m in prepared.modules() if isinstance(m, FakeQuantizeBase)]
    assert len(found) > 30
    for switch, buffer, expected in (
        (disable_observer, "observer_enabled", 0),
        (enable_observer, "observer_enabled", 1),
        (disable_fake_quant, "fake_quant_enabled", 0),
        (enable_fake_quant, "fake_quant_enabled", 1),
    ):
        prepared.apply(switch)
        assert {int(getattr(m, buffer)[0]) for m in found} == {expected}
    for module in found:  # calls on single modules work as well
        disable_observer(module)
    assert {int(m.observer_enabled[0]) for m in found} == {0}


def test_batch_norm_statistics_freeze_and_move_again() -> None:
    prepared = prepare(ConvNet)
    train(prepared, ConvNet, 2)
    state = {k: v.clone() for k, v in prepared.state_dict().items() if "running" in k or "batches" in k}
    assert len(state) == 6
    prepared.apply(freeze_bn_stats)
    train(prepared, ConvNet, 2)
    assert all(torch.equal(value, prepared.state_dict()[name]) for name, value in state.items())
    prepared.eval().train()
    train(prepared, ConvNet, 1)
    assert all(torch.equal(value, prepared.state_dict()[name]) for name, value in state.items())
    prepared.apply(update_bn_stats)
    train(prepared, ConvNet, 1)
    assert not any(torch.equal(value, prepared.state_dict()[name]) for name, value in state.items())
    state = {name: prepared.state_dict()[name].clone() for name in state}
    qat.freeze_bn_stats(prepared)
    train(prepared, ConvNet, 1)
    assert all(torch.equal(value, prepared.state_dict()[name]) for name, value in state.items())
    qat.update_bn_stats(prepared)
    train(prepared, ConvNet, 1)
    assert not any(torch.equal(value, prepared.state_dict()[name]) for name, value in state.items())


def test_eval_keeps_the_eps_of_batch_norm() -> None:
    """torchao's own switch replaces an eps of 1e-2 by the default 1e-5."""
    torch.manual_seed(0)
    model = ConvNet().train()
    prepared = tc.prepare_qat_fx(model, QConfigMapping(), (torch.randn(SHAPES[ConvNet]),))
    x = torch.randn(SHAPES[ConvNet])
    torch.testing.assert_close(prepared.eval()(x), model.eval()(x))
    for _ in range(2):
        torch.testing.assert_close(prepared.train()(x), model.train()(x))
        torch.testing.assert_close(prepared.eval()(x), model.eval()(x))


@pytest.mark.parametrize("make", [ConvNet, SequenceNet])
def test_resumed_training_is_uninterrupted_training(make: type[nn.Module], tmp_path: Path) -> None:
    whole = prepare(make)
    straight = train(whole, make, 8)
    first = prepare(make)
    optimizer = torch.optim.SGD(first.parameters(), lr=0.05, momentum=0.9)
    losses = train(first, make, 4, optimizer=optimizer)
    save_checkpoint({"model": first.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c.pt")
    second = prepare(make, seed=7)
    state = load_checkpoint(tmp_path / "c.pt")
    second.load_state_dict(state["model"])
    optimizer = torch.optim.SGD(second.parameters(), lr=0.05, momentum=0.9)
    optimizer.load_state_dict(state["optimizer"])
    losses += train(second, make, 4, first=4, optimizer=optimizer)
    assert losses == straight
    x = torch.randn(SHAPES[make])
    assert torch.equal(tc.convert_fx(second)(x), tc.convert_fx(whole)(x))


def test_observer_state_moves_by_the_legacy_functions() -> None:
    trained, fresh = prepare(SequenceNet), prepare(SequenceNet, seed=7)
    train(trained, SequenceNet, 3)
    state = get_observer_state_dict(trained)
    assert any("layer_fw.cell" in key for key in state)
    assert not all(torch.equal(value, fresh.state_dict()[key]) for key, value in state.items())
    load_observer_state_dict(fresh, state)
    assert all(torch.equal(value, fresh.state_dict()[key]) for key, value in state.items())


def losses_of_an_optimizer_made_before(prepare_qat: Callable[..., Any]) -> tuple[list[float], Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3)).train()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    x = torch.randn(4, 2, 8, 8)
    prepared, losses = prepare_qat(model, get_default_qat_qconfig_mapping("x86"), (x,)), []
    for _ in range(4):
        optimizer.zero_grad()
        loss = (prepared(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, prepared.eval(), optimizer


def test_an_optimizer_made_before_prepare_is_told() -> None:
    gc.freeze()  # What other tests left is not looked through: that takes seconds.
    theirs, *_ = losses_of_an_optimizer_made_before(fx.prepare_qat_fx)
    assert theirs[-1] < 0.9 * theirs[0]
    unmoved, prepared, optimizer = losses_of_an_optimizer_made_before(tc.prepare_qat_fx)
    assert max(unmoved[1:]) > 0.95 * unmoved[0]
    with pytest.warns(QuantizationWarning, match=r"none was ever updated.*\n?.*prepared\.parameters.*TQ512"):
        tc.convert_fx(prepared)
    # As torchq-compat run has it, the parameters are the float model's.
    ours, trained, _ = losses_of_an_optimizer_made_before(training_as_fx(tc.prepare_qat_fx))
    assert ours == pytest.approx(theirs, rel=1e-4)
    with warnings.catch_warnings():
        warnings.simplefilter("error", QuantizationWarning)
        warnings.filterwarnings("ignore", message=r".*TQ511")
        tc.convert_fx(trained)
        # Gradients alone, of a model that nobody trains, are no reason for a warning.
        del optimizer
        gc.collect()  # It refers to itself.
        tc.convert_fx(prepared)


def test_averaged_weights() -> None:
    prepared = prepare(SequenceNet)
    averaged = AveragedModel(prepared, use_buffers=True)
    snapshots = []
    for step in range(3):
        train(prepared, SequenceNet, 1, first=step)
        averaged.update_parameters(prepared)
        snapshots.append(prepared.fc.weight.detach().clone())
    torch.testing.assert_close(averaged.module.fc.weight, torch.stack(snapshots).mean(0))
    averaged.module.apply(disable_observer)
    averaged.eval()
    x = torch.randn(64, 4, 7)
    converted = tc.convert_fx(averaged.module)
    assert sqnr(averaged(x).detach(), converted(x).detach()) > 30


def test_a_float_checkpoint_loads_by_its_own_keys() -> None:
    torch.manual_seed(1)
    checkpoint = SequenceNet().state_dict()
    torch.manual_seed(0)
    model = SequenceNet()
    model.load_state_dict(checkpoint)
    prepared = tc.prepare_qat_fx(
        model.train(), get_default_qat_qconfig_mapping("qnnpack"), (torch.randn(8, 4, 7),), MAP_LSTM
    )
    names = dict(prepared.named_parameters())
    assert torch.equal(names["fc.weight"], checkpoint["fc.weight"])
    assert torch.equal(names["lstm.layers.1.layer_fw.cell.hgates.weight"], checkpoint["lstm.weight_hh_l1"])


def test_a_float_model_in_the_other_mode() -> None:
    """In FX the LSTM's training flag decides between observers and fake-quantizes."""
    model = SequenceNet().train()
    example, mapping = (torch.randn(8, 4, 7),), get_default_qat_qconfig_mapping("qnnpack")
    prepared = tc.prepare_fx(model, get_default_qconfig_mapping("qnnpack"), example, MAP_LSTM)
    assert not any(isinstance(m, FakeQuantizeBase) for m in prepared.modules())
    assert not prepared.training
    assert model.training
    qat = tc.prepare_qat_fx(model.eval(), mapping, example, MAP_LSTM)
    assert not qat.training
    assert not model.training
    said = [[d for d in tc.explain(m) if "mode of" in d.kind] for m in (prepared, qat)]
    assert [[(d.path, d.kind, d.action) for d in found] for found in said] == [
        [("", "training mode of SequenceNet", "dropped")],
        [("", "evaluation mode of SequenceNet", "dropped")],
    ]


class Flagged(nn.Module):
    """A batch norm behind a quantized op, behind a float op and by itself, and three kinds of dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fused, self.alone = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.kept, self.unfused = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.fc, self.norm = nn.Linear(4, 5), nn.BatchNorm1d(5)
        self.first, self.second = nn.Dropout(0.5), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.alone(torch.relu(self.fused(self.conv(x))))
        x = self.first(self.unfused(self.kept(x)).relu().mean((2, 3)))
        return nn.functional.dropout(self.second(self.norm(self.fc(x))), 0.5, self.training)


@pytest.mark.parametrize("in_evaluation", [[""], ["", "alone"], ["alone", "first"], ["second"]])
def test_flags_of_dropout_and_batch_norm_are_those_of_fx(in_evaluation: list[str]) -> None:
    torch.manual_seed(0)
    model, x = Flagged(), torch.randn(4, 3, 8, 8)
    for path in in_evaluation:
        model.get_submodule(path).eval()
    if in_evaluation == ["", "alone"]:
        model.second.train()
    mapping = get_default_qat_qconfig_mapping("x86").set_module_name("kept", None)
    theirs = fx.prepare_qat_fx(copy.deepcopy(model), mapping, (x,))
    ours = tc.prepare_qat_fx(model, mapping, (x,))
    flags = {path: module.training for path, module in theirs.named_modules()}
    for path, module in ours.named_modules():
        assert module.training == flags.get(path, module.training), path
    for seed in range(6):
        if seed == 3 and model.training:
            ours.train()
            theirs.train()
        torch.manual_seed(seed)
        expected = theirs(x)
        torch.manual_seed(seed)
        assert torch.equal(ours(x), expected)
    assert int(ours.alone.num_batches_tracked) == int(theirs.alone.num_batches_tracked)
    copied = copy.deepcopy(ours)
    torch.manual_seed(0)
    expected = ours(x)
    torch.manual_seed(0)
    assert torch.equal(copied(x), expected)


def test_a_float_module_in_another_mode_than_its_model() -> None:
    """FX refuses a batch norm in another mode than its convolution."""
    model, x = Flagged().train(), torch.randn(4, 3, 8, 8)
    model.fused.eval()
    mapping = get_default_qat_qconfig_mapping("qnnpack")
    with pytest.warns(
        QuantizationWarning, match=r"evaluation mode of BatchNorm2d at 'fused' is dropped.*freeze_bn"
    ):
        qat = tc.prepare_qat_fx(model, mapping, (x,))
    qat(x)
    assert int(qat.fused.num_batches_tracked) == 1
    assert not any("mode of" in d.kind for d in tc.explain(prepare(SequenceNet)))


def test_threads_calibrate_as_one() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.LSTM(8, 8)).eval()
    mapping = QConfigMapping().set_global(QConfig(MinMaxObserver, default_weight_observer))
    batches = [(torch.randn(5, 4, 8) * (1 + i % 3),) for i in range(24)]
    together = tc.prepare_fx(model, mapping, batches[0], MAP_LSTM)
    alone = copy.deepcopy(together)
    calibrate(alone, batches)
    threads = [threading.Thread(target=calibrate, args=(together, batches[i::4])) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    one, other = alone.state_dict(), together.state_dict()
    assert all(torch.equal(value, other[key]) for key, value in one.items())


def test_a_model_on_meta_stays_there() -> None:
    model = SequenceNet().to("meta").eval()
    prepared = tc.prepare_fx(
        model, get_default_qconfig_mapping("qnnpack"), (torch.randn(8, 4, 2, device="meta"),), MAP_LSTM
    )
    assert {t.device.type for t in (*prepared.parameters(), *prepared.buffers())} == {"meta"}


DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make", [ConvNet, SequenceNet])
def test_everything_follows_the_device_of_the_model(make: type[nn.Module], device: str) -> None:
    prepared, x = prepare(make, "x86", device=device), torch.randn(SHAPES[make], device=device)
    prepared(x).sum().backward()
    prepared.apply(disable_observer).eval()
    converted = tc.convert_fx(prepared)
    assert sqnr(prepared(x).detach(), converted(x).detach()) > 30
    for model in (prepared, converted):
        assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {device}


@pytest.mark.parametrize("make", [ConvNet, SequenceNet])
def test_training_on_meta_stays_there(make: type[nn.Module]) -> None:
    # On meta torch computes an LSTM step by step, in Python.
    x = torch.randn(*SHAPES[make][:-1], 2, device="meta")
    model = make().to("meta").train()
    prepared = tc.prepare_qat_fx(model, get_default_qat_qconfig_mapping("x86"), (x,), MAP_LSTM)
    assert {t.device.type for t in (*prepared.parameters(), *prepared.buffers())} == {"meta"}


def test_a_model_that_was_never_run_says_so_at_convert() -> None:
    prepared = prepare(SequenceNet, "x86")
    with pytest.warns(QuantizationWarning, match="25 observers have seen no data"):
        converted = tc.convert_fx(prepared)
    assert converted(torch.randn(SHAPES[SequenceNet])).isfinite().all()


def test_a_state_that_is_not_whole_loads_when_asked() -> None:
    """``strict`` means the same as in nn.Module; the errors are this package's."""
    prepared, other = prepare(ConvNet), prepare(ConvNet, seed=7)
    train(other, ConvNet, 2)
    state = dict(other.state_dict())
    kept = state.pop("fc.weight")
    state["stranger"] = torch.zeros(1)
    before = prepared.fc.weight.detach().clone()
    with pytest.raises(CheckpointError, match=r"fc\.weight"):
        prepared.load_state_dict(state)
    assert torch.equal(prepared.stem.weight, prepare(ConvNet).stem.weight)
    missing, unexpected = prepared.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["fc.weight"], ["stranger"])
    assert torch.equal(prepared.fc.weight, before)
    assert not torch.equal(prepared.fc.weight, kept)
    assert torch.equal(prepared.stem.weight, other.stem.weight)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_training_batch_that_is_not_finite_is_named_at_convert(bad: float) -> None:
    prepared = prepare(ConvNet)
    train(prepared, ConvNet, 2)
    with torch.no_grad():
        prepared(torch.full(SHAPES[ConvNet], bad))
    with pytest.raises(ConvertError, match=r"NaN or infinity.*: x \(activation_post_process_0\)"):
        tc.convert_fx(prepared)


DDP_SCRIPT = """
import sys, torch, torch.distributed as dist
from torch.ao.nn.intrinsic.qat import freeze_bn_stats
from torch.ao.quantization import disable_observer
from torch.nn.parallel import DistributedDataParallel
from tests.helpers.training import SequenceNet, prepare
import torchq_compat as tc

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
prepared = prepare(SequenceNet)
ddp = DistributedDataParallel(prepared)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
for step in range(4):
    if step == 3:
        ddp.module.apply(disable_observer).apply(freeze_bn_stats)
    torch.manual_seed(10 * step + rank)
    x, y = torch.randn(8, 4, 7), torch.randint(0, 3, (8,))
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(ddp(x), y).backward()
    optimizer.step()
torch.save(tc.convert_fx(prepared.eval()).state_dict(), sys.argv[3])
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_get_the_same_qparams(tmp_path: Path) -> None:
    outputs = [tmp_path / f"{rank}.pt" for rank in range(2)]
    workers = [
        subprocess.Popen(
            [
                sys.executable,
                "-W",
                "ignore",
                "-c",
                DDP_SCRIPT,
                str(rank),
                str(tmp_path / "rendezvous"),
                str(output),
            ],
            cwd=Path(__file__).parents[2],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, output in enumerate(outputs)
    ]
    errors = [worker.communicate(timeout=240)[1] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], errors
    first, second = (torch.load(output, weights_only=True) for output in outputs)
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[key]) for key, value in first.items())


def converted_output(prepared: nn.Module) -> Tensor:
    return tc.convert_fx(prepared)(torch.ones(5, 4, 8))[0]


@made_once
def calibrated() -> tuple[nn.Module, Tensor]:
    """Return a prepared model, and what it computes converted."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LSTM(8, 8)).eval()
    mapping = QConfigMapping().set_global(QConfig(MinMaxObserver, default_weight_observer))
    prepared = tc.prepare_fx(model, mapping, (torch.randn(5, 4, 8),), MAP_LSTM)
    calibrate(prepared, [(torch.randn(5, 4, 8),)])
    return prepared, converted_output(prepared).detach()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_batch_that_is_not_finite_is_named_at_convert(bad: float) -> None:
    prepared, _ = calibrated()
    prepared(torch.full((5, 4, 8), bad))
    with pytest.raises(
        ConvertError, match=r"NaN or infinity.*1\.layers\.0\.layer_fw\.cell\.igates"
    ) as caught:
        converted_output(prepared)
    assert "Hint:" in str(caught.value)


def test_an_observer_that_cannot_take_a_batch_is_named() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LSTM(8, 8)).eval()
    prepared = tc.prepare_fx(model, get_default_qconfig_mapping("x86"), (torch.randn(5, 4, 8),), MAP_LSTM)
    calibrate(prepared, [(torch.randn(5, 4, 8),)])
    before = {k: v.clone() for k, v in prepared.state_dict().items()}
    with pytest.raises(ConvertError, match=r"observer at input_1 \(activation_post_process_0\)"):
        prepared(torch.full((5, 4, 8), float("nan")))
    cell = [k for k in before if k.startswith("1.layers")]
    assert cell
    assert all(torch.equal(before[k], prepared.state_dict()[k]) for k in cell)


def test_an_empty_batch_changes_nothing() -> None:
    prepared, expected = calibrated()
    prepared(torch.zeros(5, 0, 8))
    assert torch.equal(converted_output(prepared), expected)


def test_a_branch_that_calibration_never_reaches_is_named() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
            return self.a(x), self.b(rows)

    mapping = get_default_qconfig_mapping("qnnpack")
    prepared = tc.prepare_fx(Branch().eval(), mapping, (torch.randn(3, 4), torch.randn(2, 4)))
    prepared(torch.randn(3, 4), torch.zeros(0, 4))
    with pytest.warns(QuantizationWarning, match=r"2 observers have seen no data.*b/linear_1"):
        tc.convert_fx(prepared)


def test_a_truncated_checkpoint_is_refused(tmp_path: Path) -> None:
    prepared, expected = calibrated()
    save_checkpoint(prepared, tmp_path / "c.pt")
    content = (tmp_path / "c.pt").read_bytes()
    (tmp_path / "cut.pt").write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_checkpoint(tmp_path / "cut.pt", prepared)
    assert torch.equal(converted_output(prepared), expected)


def test_a_checkpoint_of_another_model_is_refused_whole() -> None:
    prepared, expected = calibrated()
    other = {k: v for k, v in prepared.state_dict().items() if "igates" not in k}
    other["0.bias"] = torch.zeros(8)
    with pytest.raises(CheckpointError, match="does not belong to this model"):
        prepared.load_state_dict(other)
    assert torch.equal(converted_output(prepared), expected)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda value: value > 0, "is torch.bool where"),
        (lambda value: torch.full_like(value, float("nan")), "holds NaN"),
        (lambda value: value.reshape(1).to_sparse(), "is sparse or nested"),
        (lambda value: torch.nested.nested_tensor([value.reshape(1)]), "is sparse or nested"),
        (lambda value: torch.quantize_per_tensor(value, 0.1, 0, torch.quint8), "is torch.quint8"),
    ],
)
def test_a_range_that_is_no_range_is_refused(make: Callable[[Tensor], Tensor], problem: str) -> None:
    prepared, expected = calibrated()
    state = prepared.state_dict()
    names = [name for name in state if name.endswith("min_val") and state[name].numel() == 1]
    for name in names[:1] + names[-1:]:
        with pytest.raises(CheckpointError, match=rf"{re.escape(name)} {problem}.*\nHint: "):
            prepared.load_state_dict({**state, name: make(state[name])})
    assert torch.equal(converted_output(prepared), expected)


@pytest.mark.parametrize("numbers", [torch.ones(0), torch.ones(3)])
@pytest.mark.parametrize("end", ["min_val", "max_val"])
def test_a_range_whose_ends_differ_in_number_is_refused(end: str, numbers: Tensor) -> None:
    prepared, expected = calibrated()
    state = prepared.state_dict()
    name = next(name for name in state if name.endswith(end) and state[name].numel() == 1)
    with pytest.raises(CheckpointError, match=rf"{end} holds \d numbers, where .* holds \d.*\nHint: "):
        prepared.load_state_dict({**state, name: numbers})
    assert torch.equal(converted_output(prepared), expected)


def test_a_range_whose_ends_differ_in_shape_is_refused() -> None:
    prepared = tc.prepare_fx(nn.Linear(4, 4).eval(), get_default_qconfig_mapping("x86"), (torch.ones(2, 4),))
    state = prepared.state_dict()
    name = next(name for name in state if name.endswith("min_val") and not state[name].numel())
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)} has the shape \(0, 3\), where .* \(0,\)"):
        prepared.load_state_dict({**state, name: torch.ones(0, 3)})


def test_integers_that_would_wrap_around_are_refused() -> None:
    prepared, expected = calibrated()
    for model in (tc.convert_to_reference_fx(prepared), tc.convert_fx(prepared)):
        state = model.state_dict()
        name = next(name for name, value in state.items() if value.dtype is torch.int8)
        model.load_state_dict({**state, name: state[name].long()})
        for wrong in (state[name].long() + 256, state[name] > 0):
            with pytest.raises(CheckpointError, match=rf"{re.escape(name)} is {wrong.dtype} where"):
                model.load_state_dict({**state, name: wrong})
        assert torch.equal(model.state_dict()[name], state[name])
    assert torch.equal(converted_output(prepared), expected)


def save_and_die(content: object, target: Path) -> None:
    """Save in a process that ends when the content is written, and nothing after it has run."""
    child = os.fork()
    if child == 0:
        try:
            real = torch.save
            torch.save = lambda content, file: (real(content, file), file.flush(), os._exit(9))
            save_checkpoint(content, target)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def test_a_save_that_is_killed_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "c.pt"
    save_checkpoint({"w": torch.zeros(3)}, target)
    save_and_die({"w": torch.ones(1000)}, target)
    assert torch.equal(load_checkpoint(target)["w"], torch.zeros(3))


def test_a_whole_model_is_not_pickled(tmp_path: Path) -> None:
    prepared, _ = calibrated()
    for model in (prepared, tc.convert_fx(prepared)):
        with pytest.raises(CheckpointError, match=r"state_dict"):
            torch.save(model, tmp_path / "model.pt")


def test_what_capture_drops_is_reported() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model.labels = ["a", "b"]
    model[0].register_forward_hook(lambda *_: None)
    with pytest.warns(QuantizationWarning, match="hooks of Linear at '0' is dropped"):
        prepared = tc.prepare_fx(model.eval(), get_default_qconfig_mapping("x86"), (torch.randn(2, 4),))
    dropped = {(d.path, d.kind) for d in tc.explain(prepared) if d.action == "dropped"}
    assert dropped == {("labels", "attribute"), ("0", "hooks of Linear")}
