"""A disk that is full or read-only: the old file is whole, and no other file is left beside it."""

from __future__ import annotations

import os
import resource
import signal
import stat
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from torchq_compat.checkpoints import load_checkpoint, save_checkpoint
from torchq_compat.errors import CheckpointError
from torchq_compat.support.atomic_files import whole_file, write_whole

OLD, NEW = {"a": torch.ones(4)}, {"a": torch.zeros(40_000)}


@pytest.fixture
def small_disk() -> Iterator[None]:
    """Limit files to 64 KiB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.usefixtures("small_disk")
def test_a_checkpoint_on_a_full_disk(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    save_checkpoint(OLD, path)
    # torch's own writer raises a RuntimeError after the OSError.
    with pytest.raises(OSError, match="File too large"):
        save_checkpoint(NEW, path)
    assert torch.equal(load_checkpoint(path)["a"], OLD["a"])
    assert os.listdir(tmp_path) == ["state.pt"]


@pytest.mark.usefixtures("small_disk")
@pytest.mark.parametrize("name", ["page.html", "model.pte"])
def test_a_page_and_a_program_on_a_full_disk(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    write_whole(path, "old")
    with pytest.raises(OSError, match="File too large"):
        write_whole(path, "new" * 100_000)
    with pytest.raises(OSError, match="File too large"), whole_file(path) as file:
        file.write(bytes(100_000))
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == [name]


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [
        lambda: None,
        torch.ones(2).to_mkldnn(),
        nested(100_000),
        # What torch.save writes and load_checkpoint would refuse.
        nn.Linear(2, 2),
        np.ones(3),
        np.float64(3.0),
        Path("a"),
        range(3),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_saved_leaves_the_old_checkpoint(value: Any, tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    save_checkpoint(OLD, path)
    with pytest.raises(CheckpointError, match=r"cannot be saved.*\nHint: "):
        save_checkpoint({"a": value}, path)
    assert torch.equal(load_checkpoint(path)["a"], OLD["a"])
    assert os.listdir(tmp_path) == ["state.pt"]


@pytest.mark.parametrize("value", [1j, {1}, b"a", torch.int8, torch.Size([2]), OrderedDict(a=1), None])
def test_what_is_saved_can_be_read(value: Any, tmp_path: Path) -> None:
    save_checkpoint({"a": value}, tmp_path / "state.pt")
    assert load_checkpoint(tmp_path / "state.pt") == {"a": value}


def test_a_float_model_is_loaded_whole_or_not_at_all(tmp_path: Path) -> None:
    path, model = tmp_path / "state.pt", nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))
    save_checkpoint(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 4)), path)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"(?s)size mismatch for 1\.weight.*\nHint: "):
        load_checkpoint(path, model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    load_checkpoint(path, fits := nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 4)))
    assert torch.equal(fits[1].weight, load_checkpoint(path)["1.weight"])


def test_a_checkpoint_of_an_accelerator_is_read_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state.pt"
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
    save_checkpoint(OLD, path)
    monkeypatch.undo()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert torch.equal(load_checkpoint(path)["a"], OLD["a"])


def test_a_link_to_itself(tmp_path: Path) -> None:
    (tmp_path / "loop.pt").symlink_to("loop.pt")
    with pytest.raises(OSError, match="symbolic links"):
        save_checkpoint(OLD, tmp_path / "loop.pt")


def test_a_read_only_file_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "page.html"
    write_whole(path, "old")
    path.chmod(0o444)
    # root can write every file.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(PermissionError, match="Permission denied"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["page.html"]


def test_mode_and_link_stay(tmp_path: Path) -> None:
    path, link = tmp_path / "real.html", tmp_path / "link.html"
    write_whole(path, "old")
    path.chmod(0o600)
    link.symlink_to(path)
    write_whole(link, "new")
    assert link.is_symlink()
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_device_stays_a_device(tmp_path: Path) -> None:
    link = tmp_path / "null"
    link.symlink_to(os.devnull)
    write_whole(link, "new")
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)


def test_a_name_as_long_as_names_may_be(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 255)
    write_whole(path, "new")
    assert path.read_text() == "new"


def test_a_full_device_is_said(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        write_whole(Path("/dev/full"), "new")


def test_killed_while_it_writes(tmp_path: Path) -> None:
    """Nothing can clean up after a kill, but the old file is whole."""
    path = tmp_path / "page.html"
    write_whole(path, "old")
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from torchq_compat.support.atomic_files import whole_file\n"
        "with whole_file(Path(sys.argv[1])) as file:\n"
        "    file.write(b'new'); file.flush(); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert path.read_text() == "old"
