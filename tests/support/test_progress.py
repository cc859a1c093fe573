"""Slow runs say on a terminal which stage they are in, and at the end how long each took."""

from __future__ import annotations

import io
import re
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.ao.quantization import get_default_qconfig_mapping

from torchq_compat import cli, convert_fx, export, prepare_fx
from torchq_compat.support import report
from torchq_compat.support.report import QUIET, slow_stages


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.delenv(QUIET, raising=False)
    monkeypatch.setattr(report, "PATIENCE", 0.02)
    standard_error = Terminal()
    monkeypatch.setattr(report, "sys", SimpleNamespace(stderr=standard_error))
    return standard_error


def two_stages() -> None:
    with slow_stages("work") as begin:
        begin("first")
        time.sleep(0.05)
        with slow_stages("inner") as begin_inner:
            begin_inner("unseen")
        begin("second")
        time.sleep(0.08)


def test_stages_and_their_times(terminal: Terminal) -> None:
    two_stages()
    *lines, last = terminal.getvalue().splitlines()
    assert lines[0] == "torchq_compat: work: first, 0 s"
    assert lines[-1] == "torchq_compat: work: second, 0 s"
    assert re.fullmatch(r"torchq_compat: work took 0.\d s: second 0.1 s, first 0.\d s", last)


def test_prepare_names_its_passes(terminal: Terminal) -> None:
    prepare_fx(nn.Linear(2, 2).eval(), get_default_qconfig_mapping("x86"), (torch.randn(1, 2),))
    assert re.search(r"prepare took .* s: capture ", terminal.getvalue())


def test_export_says_how_long_it_took(terminal: Terminal) -> None:
    x = torch.randn(1, 2)
    prepared = prepare_fx(nn.Linear(2, 2).eval(), get_default_qconfig_mapping("x86"), (x,))
    prepared(x)
    export(convert_fx(prepared), (x,))
    assert re.search(r"export took \d+\.\d s\n", terminal.getvalue())


@pytest.mark.parametrize("reason", ["quiet", "no terminal"])
def test_silence(terminal: Terminal, monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    if reason == "quiet":
        monkeypatch.setenv(QUIET, "")
        assert cli.main(["--quiet", "explain", "TQ101"]) == 0
    else:
        monkeypatch.setattr(Terminal, "isatty", lambda self: False)
    two_stages()
    assert terminal.getvalue() == ""


def test_an_error_inside_stays_the_error(terminal: Terminal) -> None:
    with pytest.raises(ValueError, match="mine"), slow_stages("work"):
        raise ValueError("mine")
    assert terminal.getvalue() == ""
