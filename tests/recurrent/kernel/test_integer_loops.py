"""The loops over integers, without torch: vectors, plain C++ as for ARM, sanitizers, an emulated ARM."""

from __future__ import annotations

import pytest

from tests.native_harness.builds import (
    BUILDS,
    EMULATED,
    SANITIZED,
    Build,
    compile_integer_loops,
    run_integer_loops,
)

PLAIN = Build(("-O1", "-DTORCHQ_COMPAT_PLAIN"))
OF_LIBRARY, SANITIZER = "a library's", "address and undefined"
#: The program starts no threads.
MORE = {**BUILDS, SANITIZER: SANITIZED[SANITIZER], **EMULATED}


@pytest.fixture(scope="module")
def plain() -> list[str]:
    hashes = run_integer_loops(PLAIN, compile_integer_loops(PLAIN))
    assert len(set(hashes)) > 70
    return hashes


def test_vectors_have_the_bits_of_plain_code(plain: list[str]) -> None:
    program = compile_integer_loops(BUILDS[OF_LIBRARY])
    for asked in (None, "avx512_vnni", "avx512", "avx2", "sse2"):
        assert run_integer_loops(BUILDS[OF_LIBRARY], program, asked) == plain, asked


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, build in MORE.items() if build.is_possible()])
def test_every_build_has_the_same_bits(name: str, plain: list[str]) -> None:
    assert run_integer_loops(MORE[name], compile_integer_loops(MORE[name])) == plain
