"""torch.export of converted recurrent modules: a scan over time, at any sequence length, bit for bit."""

from __future__ import annotations

import functools
import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from tests.helpers.exported_models import converted_alone
from tests.helpers.oracle import leaves

NAMES = ("lstm", "projected", "bidirectional gru", "forward rnn", "dynamic")


def exported(model: nn.Module, first: int, second: int) -> ExportedProgram:
    sizes = {0: Dim("first"), 1: Dim("second")}
    return torch.export.export(model, (torch.randn(first, second, 8),), dynamic_shapes=(sizes,))


@functools.cache
def alone_exported(name: str) -> ExportedProgram:
    return exported(converted_alone(name), 6, 3)


def same_bits(model: nn.Module, program: ExportedProgram) -> bool:
    module = program.module()
    with torch.no_grad():
        for shape in ((4, 3), (9, 17)):
            x = torch.randn(*shape, 8)
            pairs = zip(leaves(model(x)), leaves(module(x)), strict=True)
            if not all(torch.equal(a, b) for a, b in pairs):
                return False
    return True


@pytest.mark.parametrize("name", NAMES)
def test_rolled_with_the_same_bits(name: str) -> None:
    model: Any = converted_alone(name)
    program = alone_exported(name)
    scans = [n for n in program.graph.nodes if n.target is torch.ops.higher_order.scan]
    assert len(scans) == len(list(model.rnn.cells()))
    assert same_bits(model, program)


@pytest.mark.slow
def test_saved_loaded_and_exported_again() -> None:
    model = converted_alone("lstm")
    program = exported(model, 6, 3)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file)
    assert same_bits(model, loaded)
    assert same_bits(model, exported(loaded.module(), 9, 4))
    integers = [v for v in loaded.state_dict.values() if v.dtype is torch.int8]
    assert sum(v.numel() for v in integers) == 2 * 4 * 12 * (8 + 12) + 2 * 4 * 12 * (24 + 12)


def test_the_program_does_not_grow_with_the_length() -> None:
    model = converted_alone("bidirectional gru")
    programs = (alone_exported("bidirectional gru"), exported(model, 64, 3))
    assert len({len(list(program.graph.nodes)) for program in programs}) == 1
