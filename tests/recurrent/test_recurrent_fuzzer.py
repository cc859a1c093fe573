"""A short run of the fuzzer of recurrent contracts; in full: ``python -m tests.fuzz.recurrent_fuzzer``."""

from __future__ import annotations

import pytest

from tests.fuzz.recurrent_fuzzer import FINE, run


@pytest.mark.parametrize("seed", range(13))
def test_a_random_contract_passes(seed: int) -> None:
    assert run(seed) in FINE
