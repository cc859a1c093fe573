"""The cell loop at the edges: empty batches, NaN and infinity, wide inputs, threads, forks, its cache."""

from __future__ import annotations

import contextlib
import copy
import errno
import gc
import math
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import (
    QConfigMapping,
    default_dynamic_qconfig,
    get_default_qat_qconfig_mapping,
    get_default_qconfig_mapping,
)

import torchq_compat as tc
from tests.helpers.cell_loop_shared import cell_loop, inputs_of, native
from tests.helpers.converted_cells import cells_of, converted
from tests.helpers.native_edges_shared import Whole
from tests.helpers.once import made_once
from tests.helpers.oracle import leaves, sqnr
from tests.helpers.processes import in_fork
from tests.native_harness.calls import _Cell, as_numbers, random_call
from torchq_compat.errors import CustomModuleError, QuantizationWarning
from torchq_compat.read.qparams import PerTensorQParams
from torchq_compat.recurrent.kernel import build, op
from torchq_compat.recurrent.kernel.build import one_at_a_time
from torchq_compat.recurrent.over_time import RecurrentDirection
from torchq_compat.support.process_state import once


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Model(nn.Module):
    def __init__(self, rnn: nn.Module) -> None:
        super().__init__()
        self.rnn = rnn
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


@made_once
def lowered_pair(dtype: torch.dtype = torch.float32) -> tuple[Any, Any, Any]:
    """Return (float, reference, lowered)."""
    model, x = Model(nn.LSTM(6, 8)).eval().to(dtype), torch.randn(9, 3, 6).to(dtype)
    config = tc.get_default_prepare_custom_config()
    prepared = tc.prepare_fx(model, get_default_qconfig_mapping(), (x,), config)
    prepared(x)
    return model, tc.convert_to_reference_fx(prepared), tc.convert_fx(prepared)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_models_of_other_float_dtypes_keep_them(dtype: torch.dtype) -> None:
    model, reference, lowered = lowered_pair.itself(dtype)
    x = torch.randn(9, 3, 6).to(dtype)
    assert torch.equal(reference(x), lowered(x))
    assert lowered(x).dtype is dtype
    assert 15 < sqnr(model(x).float(), lowered(x).float()) < 60
    reasons = [d.reason for d in tc.explain(lowered).decisions]
    assert any(f"computes in {dtype}" in reason for reason in reasons)


@torch.no_grad()
def test_no_rows_and_no_steps() -> None:
    model, reference, lowered = lowered_pair.itself()
    empty = torch.zeros(5, 0, 6)
    assert model(empty).shape == reference(empty).shape == lowered(empty).shape == (5, 0, 4)
    for each in (reference, lowered):
        with pytest.raises(CustomModuleError, match="the sequence has no steps"):
            each(torch.zeros(0, 3, 6))


@torch.no_grad()
@pytest.mark.parametrize("make", [lambda: nn.LSTM(6, 8, 2), lambda: nn.GRU(6, 8, bidirectional=True)])
def test_no_rows_where_qparams_are_chosen_from_them(make: Any) -> None:
    module, x = make().eval(), torch.randn(9, 3, 6)
    prepared = tc.prepare_fx(Whole(module).eval(), QConfigMapping().set_global(default_dynamic_qconfig), (x,))
    for each in (tc.convert_to_reference_fx(prepared), tc.convert_fx(prepared)):
        for a, b in zip(leaves(each(x[:, :0])), leaves(module(x[:, :0])), strict=True):
            assert a.shape == b.shape


@torch.no_grad()
@pytest.mark.parametrize("name", ["lstm", "gru", "16-bit lstm"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_goes_as_in_the_graph(name: str, value: float) -> None:
    cell = cells_of(converted.itself(name))[0]
    x, states = inputs_of(cell, 4, 3)
    for place in ("x", "state"):
        given, start = x.clone(), [state.clone() for state in states]
        (given if place == "x" else start[0]).view(-1)[3] = value
        columns = ((x.shape[-1], None),)
        expected = leaves(RecurrentDirection(cell)(given, tuple(start)))
        found = leaves(native(cell, given, tuple(start), columns=columns))
        for a, b in zip(expected, found, strict=True):
            assert torch.equal(a.isnan(), b.isnan())
            assert sqnr(a.nan_to_num(), b.nan_to_num()) > 30


@made_once
def dynamic_pair() -> tuple[Any, Any]:
    """Return (reference, lowered)."""
    mapping = QConfigMapping().set_global(default_dynamic_qconfig)
    prepared = tc.prepare_fx(Whole(nn.GRU(6, 8)).eval(), mapping, (torch.randn(4, 3, 6),))
    return tc.convert_to_reference_fx(prepared), tc.convert_fx(prepared)


@torch.no_grad()
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_goes_as_in_the_dynamic_graph(value: float) -> None:
    x = torch.randn(4, 3, 6)
    x[2, 1, 3] = value
    reference, lowered = dynamic_pair.itself()
    for a, b in zip(leaves(reference(x)), leaves(lowered(x)), strict=True):
        assert torch.equal(a.isnan(), b.isnan())
        assert a.isnan().any()


@torch.no_grad()
def test_a_sum_of_more_columns_than_32_bits_hold() -> None:
    """255 * 127 * 70,000 exceeds 2^31."""
    torch.manual_seed(0)
    qparams = PerTensorQParams(1e-5, 0, 0, 255, torch.uint8)
    cells = (_Cell(random.Random(seed), 3, 70_000) for seed in range(200))
    cell = next(c for c in cells if not c.dynamic and c.weights[1] is None and not c.split)
    for index in range(0, len(cell.weights), 4):
        cell.weights[index] = torch.full_like(cell.weights[index], 127)  # type: ignore[arg-type]
    x = torch.full((1, 2, 70_000), 255e-5)
    states = [torch.zeros(2, slot.width) for slot in cell.program.slots[1 : 1 + len(cell.program.results)]]
    table, constants = cell.program.table, cell.program.constants
    quantized, in_floats = (
        cell_loop(x, states, cell.weights, table, constants, as_numbers(((70_000, g),)), backward=False)[0]
        for g in (qparams, None)
    )
    assert torch.allclose(quantized, in_floats, atol=1e-3)


@pytest.mark.parametrize("name", ["16-bit lstm", "lstm", "split gru", "projected lstm"])
def test_threads_change_no_bit_where_states_lie_on_no_8_bit_qparams(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = cells_of(converted.itself(name))[0]
    x, states = inputs_of(cell, 40, 3)
    off = tuple(state * 0.7371 for state in states)
    for given in (states, off):
        monkeypatch.setattr(op, "WORK_PER_THREAD", 1 << 60)
        alone = leaves(native(cell, x, given))
        monkeypatch.setattr(op, "WORK_PER_THREAD", 1)
        torch.set_num_threads(2)
        for _ in range(5):
            assert all(map(torch.equal, alone, leaves(native(cell, x, given))))


def arguments(call: Any, **changed: Any) -> tuple[tuple[Any, ...], bool]:
    names = ("x", "states", "weights", "table", "constants", "input_qparams")
    values = {name: getattr(call, name) for name in names} | changed
    return tuple(values[name] for name in names), call.backward


@pytest.mark.parametrize("wrong", ["dtype", "rank", "width", "batch", "count", "weight", "table"])
def test_arguments_that_do_not_fit_the_program(wrong: str) -> None:
    call = next(c for c in map(random_call, range(9)) if c.x.numel())
    changes: dict[str, tuple[str, Any]] = {
        "dtype": ("x", call.x.double()),
        "rank": ("x", call.x[0]),
        "width": ("x", call.x[..., :-1]),
        "batch": ("states", [state[:-1] for state in call.states]),
        "count": ("states", []),
        "weight": ("weights", [call.weights[0].float(), *call.weights[1:]]),  # type: ignore[union-attr]
        "table": ("table", call.table[:-1]),
    }
    name, value = changes[wrong]
    given, backward = arguments(call, **{name: value})
    with pytest.raises(RuntimeError):
        cell_loop(*given, backward=backward)


@torch.no_grad()
@pytest.mark.parametrize("how", ["state_dict", "parameter", "replaced", "data pointer"])
def test_lowered_models_follow_their_weights(how: str) -> None:
    _, reference, lowered = lowered_pair()
    x = torch.randn(9, 3, 6)
    before = lowered(x)
    bias = next(
        name for name, value in lowered.state_dict().items() if value.shape == (4,) and "bias" in name
    )
    home, _, name = bias.rpartition(".")
    owner = lowered.get_submodule(home)
    if how == "state_dict":
        lowered.state_dict()[bias].add_(1.0)
    elif how == "parameter":
        getattr(owner, name).add_(1.0)
    elif how == "replaced":
        setattr(owner, name, nn.Parameter(getattr(owner, name) + 1.0, requires_grad=False))
    else:
        getattr(owner, name).data = getattr(owner, name).data + 1.0
    after = lowered(x)
    assert not torch.equal(before, after)
    assert sqnr(lowered.reference(x), after) > 45
    assert sqnr(reference(x), before) > 45


@made_once
def quantized_dynamically() -> Any:
    return tc.quantize_dynamic(Model(nn.LSTM(6, 8)).eval(), {nn.LSTM}, whole_range=True)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.int8, torch.float32])
@pytest.mark.parametrize("how", ["data", "swapped"])
def test_dynamic_modules_follow_tensors_that_get_other_numbers(how: str, dtype: torch.dtype) -> None:
    """Setting ``data``, as ``nn.Module.to`` does, changes neither the tensor nor its version."""
    made, x = quantized_dynamically(), torch.randn(9, 3, 6)
    assert torch.equal(made(x), made(x))
    own = chain(made.rnn.named_parameters(), made.rnn.named_buffers())
    tensor = next(value for _, value in own if value.dtype is dtype)
    for _ in range(3):
        before, new = made(x), torch.roll(tensor.detach(), 3, 0)
        if how == "data":
            tensor.data = new
        else:
            torch.utils.swap_tensors(tensor, nn.Parameter(new) if isinstance(tensor, nn.Parameter) else new)
        assert not torch.equal(made(x), before)
        assert torch.equal(made(x), copy.deepcopy(made)(x))


@torch.no_grad()
def test_copies_share_no_packed_weights() -> None:
    _, _, lowered = lowered_pair()
    x = torch.randn(9, 3, 6)
    before, deep = lowered(x), copy.deepcopy(lowered)
    for name, value in deep.state_dict().items():
        if "bias" in name:
            value.add_(1.0)
    assert not torch.equal(deep(x), before)
    assert torch.equal(lowered(x), before)


@pytest.mark.parametrize("is_qat", [False, True])
def test_models_are_freed_when_they_are_dropped(is_qat: bool) -> None:
    gc.freeze()  # What other tests left is not looked through: that takes seconds.
    model, x = Model(nn.LSTM(6, 8)).train(is_qat), torch.randn(5, 3, 6)
    config = tc.get_default_prepare_custom_config()
    if is_qat:
        prepared = tc.prepare_qat_fx(model, get_default_qat_qconfig_mapping(), (x,), config)
    else:
        prepared = tc.prepare_fx(model, get_default_qconfig_mapping(), (x,), config)
    prepared(x)
    made = [prepared, tc.convert_to_reference_fx(prepared), tc.convert_fx(prepared)]
    held = [weakref.ref(each) for each in made]
    del prepared, made
    gc.collect()
    assert [each() for each in held] == [None, None, None]


def test_a_fork_after_threads_were_used_computes_with_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cell = cells_of(converted.itself("gru"))[0]
    x, states = inputs_of(cell, 5, 3)
    monkeypatch.setattr(op, "WORK_PER_THREAD", 1)
    torch.set_num_threads(2)
    expected = native(cell, x, states)[0]
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            (tmp_path / "found").write_bytes(native(cell, x, states)[0].numpy().tobytes())
        os._exit(0)
    until, ended = time.monotonic() + 30, (0, 0)
    while ended == (0, 0) and time.monotonic() < until:
        time.sleep(0.01)
        ended = os.waitpid(child, os.WNOHANG)
    if ended == (0, 0):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended == (child, 0)
    assert (tmp_path / "found").read_bytes() == expected.numpy().tobytes()


#: A compiler that takes no time: it copies the kernel of this process and records its calls.
COMPILER = """\
while [ "$1" != -o ]; do shift; done
cp "$KERNEL" "$2" && echo "$2" >> "$COMPILED"
"""


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    compiler, directory = tmp_path / "compiler", tmp_path / "cache"
    compiler.write_text(COMPILER)
    monkeypatch.setenv("KERNEL", str(build.kernel_build().library))
    monkeypatch.setenv("COMPILED", str(tmp_path / "compiled"))
    monkeypatch.setenv("CXX", f"sh {compiler}")
    monkeypatch.setenv("TORCHQ_COMPAT_CACHE_DIR", str(directory))
    assert build.build_kernel().library is not None
    return next(directory.iterdir())


@pytest.mark.parametrize("damage", ["cut", "empty", "junk", "others may write", "a bit"])
def test_a_library_that_must_not_be_loaded_is_built_again(cache: Path, damage: str) -> None:
    whole = cache.read_bytes()
    if damage == "others may write":
        cache.chmod(0o777)
    else:
        content = {"cut": whole[:5000], "empty": b"", "junk": b"junk" * 9}.get(damage, whole[:-1] + b"?")
        cache.unlink()  # Not in place: the file is loaded.
        cache.write_bytes(content)
        cache.chmod(0o755)
    with pytest.warns(QuantizationWarning, match="was built again"):
        assert build.build_kernel().library is not None
    assert cache.stat().st_mode & 0o022 == 0
    assert build.build_kernel().library is not None


def to_another_user(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.getuid() == 0:
        os.chown(path, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)


def test_a_library_of_another_user(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    to_another_user(cache, monkeypatch)
    with pytest.warns(QuantizationWarning, match="another user owns it"):
        made = build.build_kernel()
    assert made.library is None or cache.stat().st_uid == os.geteuid()


def test_a_link_is_not_followed(cache: Path, tmp_path: Path) -> None:
    cache.rename(tmp_path / "elsewhere.so")
    cache.symlink_to(tmp_path / "elsewhere.so")
    with pytest.warns(QuantizationWarning, match="was built again"):
        assert build.build_kernel().library == cache
    assert not cache.is_symlink()


@pytest.mark.parametrize(
    "fault", ["everybody may write it", "the group may write it", "another user owns it"]
)
def test_a_directory_that_others_may_write_is_not_used(
    cache: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault == "another user owns it":
        to_another_user(cache.parent, monkeypatch)
    else:
        cache.parent.chmod(0o1777 if fault.startswith("everybody") else 0o770)
    made = build.build_kernel()
    assert made.library is None
    assert made.code == "TQ805"
    assert str(cache.parent) in made.problem
    assert made.problem.endswith(("other users may write it", "another user owns it"))
    assert "TORCHQ_COMPAT_CACHE_DIR" in made.hint


def test_what_is_loaded_is_what_was_checked(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []

    def exchanging(path: str) -> None:
        cache.unlink()
        cache.write_bytes(b"another's")
        loaded.append(Path(path).read_bytes())

    whole = cache.read_bytes()
    monkeypatch.setattr(build, "_load_operators", exchanging)
    build.build_kernel()
    assert loaded == [whole]


def test_a_build_that_was_killed_is_swept_up_and_does_not_block(cache: Path) -> None:
    killed, running = (cache.with_name(f"build-{name}") for name in ("killed", "running"))
    for directory in (killed, running):
        directory.mkdir()
        (directory / "half.o").touch()
    os.utime(killed, (0, 0))
    cache.unlink()
    assert build.build_kernel().library is not None
    assert sorted(cache.parent.iterdir()) == [running, cache]


FULL = """\
while [ "$1" != -o ]; do shift; done
echo "/tmp/of_gcc.s: Assembler messages:" >&2
echo "/usr/bin/ld: final link failed: No space left on device" >&2; exit 1
"""


def raise_that_it_is_full(_: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cache.unlink()
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", raise_that_it_is_full)
        made = build.build_kernel()
    assert made.library is None
    assert made.code == "TQ805"
    assert made.hint.startswith("Free space")
    assert not list(cache.parent.iterdir())
    (tmp_path / "compiler").write_text(FULL)
    made = build.build_kernel()
    assert made.hint.startswith("Free space")
    assert "No space left on device" in made.problem


def test_a_fork_beside_a_build_waits_for_it(cache: Path) -> None:
    """The thread that builds does not exist in the child, which must not hold its lock on the directory."""
    cache.unlink()
    began = threading.Event()

    def compile_slowly(made: Path) -> None:
        began.set()
        time.sleep(0.3)
        shutil.copy(os.environ["KERNEL"], made)

    thread = threading.Thread(target=build.load_or_make, args=(cache.name, compile_slowly, str))
    thread.start()
    assert began.wait(60)
    assert not in_fork(lambda: build.build_kernel().library == cache and cache.exists())
    thread.join()
    cache.unlink()
    assert build.build_kernel().library == cache


def test_two_builders_at_once(cache: Path) -> None:
    cache.unlink()
    compiled = cache.parent.with_name("compiled")
    compiled.unlink()
    processes = [
        multiprocessing.get_context("fork").Process(
            target=lambda: os._exit(build.build_kernel().library is None)
        )
        for _ in range(2)
    ]
    for each in processes:
        each.start()
    for each in processes:
        each.join(120)
    assert [each.exitcode for each in processes] == [0, 0]
    assert list(cache.parent.iterdir()) == [cache]
    names = sorted(Path(line).name for line in compiled.read_text().splitlines())
    objects = [f"{source.stem}.o" for source in (build.SOURCE, *build.OPERATORS)]
    assert names == sorted([*objects, cache.name])


def test_a_builder_that_hangs_is_not_waited_for_longer_than_a_build_may_take(tmp_path: Path) -> None:
    directory = os.open(tmp_path, os.O_RDONLY)
    with one_at_a_time(directory, 5):
        began = time.monotonic()
        with one_at_a_time(directory, 0.3):
            waited = time.monotonic() - began
    assert 0.25 < waited < 3
    began = time.monotonic()
    with one_at_a_time(directory, 30):
        assert time.monotonic() - began < 3
    os.close(directory)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"CXX": "g++ 'unclosed"}, "CXX cannot be read"),
        ({"CXX": "true"}, "No such file"),
        ({"CXX": "sh -c 'printf \"\\377 bytes\" >&2; exit 1' --"}, "bytes"),
        ({"TORCHQ_COMPAT_CACHE_DIR": "~no-such-user-here/x"}, "home"),
        ({"TORCHQ_COMPAT_CACHE_DIR": "/dev/null/x"}, "/dev/null"),
    ],
)
def test_without_a_kernel_there_is_a_reason(
    settings: dict[str, str], problem: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHQ_COMPAT_CACHE_DIR", str(tmp_path))
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    made = build.build_kernel()
    assert made.library is None
    assert problem in made.problem


def test_without_a_directory_there_is_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no search for a compiler, which would not help."""
    monkeypatch.delenv("TORCHQ_COMPAT_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    ask = once(build.kernel_build.__wrapped__)  # type: ignore[attr-defined]
    with pytest.warns(QuantizationWarning) as told:
        assert [ask().is_loaded for _ in range(2)] == [False, False]
    (warning,) = told
    assert isinstance(warning.message, QuantizationWarning)
    assert warning.message.code == "TQ805"
    assert "/dev/null/torchq_compat: Not a directory" in str(warning.message)
    assert "compiler" not in str(warning.message)


def test_a_tilde_is_the_home_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TORCHQ_COMPAT_CACHE_DIR", "~/kernels")
    monkeypatch.setenv("CXX", "true")
    build.build_kernel()
    assert (tmp_path / "kernels").is_dir()


PEAK = """
import gc, sys, warnings
warnings.simplefilter("ignore")
import torch
import torchq_compat as tc
from torch.ao.quantization import get_default_qconfig_mapping
from tests.helpers.native_edges_shared import Whole

def kilobytes(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))

model, x = Whole(torch.nn.LSTM(1024, 1024, 2)).eval(), torch.randn(2, 2, 1024)
weights = sum(parameter.numel() * 4 for parameter in model.parameters()) / 1024
config = tc.get_default_prepare_custom_config()
prepared = tc.prepare_fx(model, get_default_qconfig_mapping(), (x,), config)
prepared(x)
gc.collect()
before = kilobytes("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
converted = tc.convert_fx(prepared)
print((kilobytes("VmHWM") - before) / weights)
"""


@pytest.mark.slow
def test_convert_needs_at_most_four_times_the_float_weights() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PEAK], check=True, capture_output=True, text=True, timeout=600
    )
    assert 0.25 < float(ended.stdout.split()[-1]) < 4
