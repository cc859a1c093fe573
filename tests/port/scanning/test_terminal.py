"""Progress and colour: on a terminal, and nowhere else."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

import torchq_compat

ROOT = Path(torchq_compat.__file__).parents[1]
CODE = "from torch.ao.quantization.quantize_fx import prepare_fx\n"


def on_a_terminal(*args: str, **environment: str) -> str:
    """Return what ``torchq-compat`` shows on a terminal of its own."""
    ours, theirs = pty.openpty()
    base = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "COLUMNS": "120"}
    base.pop("NO_COLOR", None)
    command = [sys.executable, "-m", "torchq_compat", *args]
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env={**base, **environment}) as process:
        os.close(theirs)
        shown = b""
        while chunk := _read(ours):
            shown += chunk
        process.wait(60)
    os.close(ours)
    return shown.decode()


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # Linux reports the closed other end in this way
        return b""


@pytest.mark.parametrize("command", ["scan", "rewrite"])
def test_a_terminal_gets_progress_and_colour(tmp_path: Path, command: str) -> None:
    (tmp_path / "a.py").write_text(CODE)
    shown = on_a_terminal(command, str(tmp_path))
    assert "Reading" in shown
    assert "Parsing" in shown
    assert "\x1b[1" in shown or "\x1b[3" in shown


def test_no_color(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(CODE)
    shown = on_a_terminal("rewrite", str(tmp_path), NO_COLOR="1")
    assert "\x1b[31m" not in shown
    assert "\x1b[32m" not in shown
    assert "+from torchq_compat.quantize_fx" in shown


def test_a_pipe_gets_neither(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(CODE)
    command = [sys.executable, "-m", "torchq_compat", "scan", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 1
    assert result.stderr == ""
    assert "\x1b" not in result.stdout


@pytest.mark.parametrize("command", ["scan", "rewrite"])
def test_whoever_reads_may_stop(tmp_path: Path, command: str) -> None:
    (tmp_path / "a.py").write_text(CODE)
    reading, writing = os.pipe()
    os.close(reading)
    arguments = [sys.executable, "-m", "torchq_compat", command, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(arguments, stdout=writing, stderr=subprocess.PIPE, env=environment, check=False)
    os.close(writing)
    assert result.returncode == 141
    assert b"Traceback" not in result.stderr
