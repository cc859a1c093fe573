"""A short run of the harness: some programs on two builds, and that it finds the faults it exists for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers.cell_loop_shared import cell_loop
from tests.native_harness.builds import BUILDS, EMULATED, SANITIZED, SHORT, Build, compile_replay, run_replay
from tests.native_harness.calls import Call, any_calls, random_call, results_of, write_calls
from torchq_compat.recurrent.kernel.build import HEADERS, SOURCE
from torchq_compat.recurrent.kernel.interpreter import run_interpreted


@pytest.fixture(scope="module")
def programs() -> list[Call]:
    return list(any_calls(45, largest_hidden=40, largest_batch=20))


@pytest.fixture(scope="module")
def calls(programs: list[Call], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("calls") / "calls"
    write_calls(programs, path)
    return path


@pytest.fixture(scope="module")
def expected(programs: list[Call]) -> bytes:
    """Return the results of the operator that users run."""
    return b"".join(map(results_of, programs))


def test_a_sanitizer_finds_nothing_and_bits_are_equal(calls: Path, expected: bytes) -> None:
    assert len(expected) > 100_000
    results, problem = run_replay(SHORT, compile_replay(SHORT), calls, (1, 3))
    assert problem == ""
    assert results == expected


ALL = {**BUILDS, **SANITIZED, **EMULATED}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, build in ALL.items() if build.is_possible()])
def test_every_build_gives_the_same_bits(name: str, calls: Path, expected: bytes) -> None:
    """All instruction sets of this or the emulated machine are covered; builds that lack a tool are not."""
    build = ALL[name]
    results, problem = run_replay(build, compile_replay(build), calls, (1, 2, 3))
    assert problem == ""
    assert results == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "right", "wrong"),
    [
        ("threads", "if (stage.waits) team_.barrier", "if (false) team_.barrier"),
        ("address and undefined", "lanes = std::min(kLanes, shape.units - first)", "lanes = kLanes"),
        ("address and undefined", "std::min(kernels_.beside, product.column_count() - c)", "kernels_.beside"),
    ],
)
def test_a_fault_put_in_is_found(build: str, right: str, wrong: str, calls: Path, tmp_path: Path) -> None:
    source = SOURCE.read_text()
    assert source.count(right) == 1
    broken = tmp_path / SOURCE.name
    broken.write_text(source.replace(right, wrong))
    for header in HEADERS:
        (tmp_path / header.name).write_text(header.read_text())
    made: Build = SANITIZED[build]
    assert run_replay(made, compile_replay(made, broken), calls, (3,))[1] != ""


def sample(seed: int) -> Call:
    return random_call(seed, largest_hidden=20, largest_batch=6)


@pytest.mark.parametrize("seeds", [range(60)])
def test_the_operators_give_what_the_kernel_gives(seeds: range) -> None:
    """NaN where the kernel has NaN, and otherwise equal, except for values midway between two steps."""
    far = compared = 0
    for seed in seeds:
        call = sample(seed)
        *arguments, backward = call.arguments()
        output, last = cell_loop(*arguments, backward=backward)
        if not call.x.numel():
            assert output.shape[:2] == call.x.shape[:2]
            assert all(map(torch.equal, last, call.states))
            continue
        expected, expected_last = run_interpreted(*arguments[:-1], backward=backward)
        for a, b in zip((output, *last), (expected, *expected_last), strict=True):
            compared += 1
            far += not torch.equal(a.isnan(), b.isnan()) or not torch.allclose(a, b, atol=0.3, equal_nan=True)
    assert compared > 80
    assert far <= 0.05 * compared
