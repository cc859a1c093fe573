"""``python -m tests.parity``: run FX and store its results."""

from __future__ import annotations

import warnings

import torch
import torchao

from tests.parity.cases import CASES, Case
from tests.parity.comparison import fx_result
from tests.parity.fx_parts import FLOWS, fx_flow
from tests.parity.fx_results import ALL, CORPUS, PARTS, SAMPLES, as_data, write
from tests.parity.known_differences import KNOWN_DIFFERENCES


def main() -> None:
    versions = {
        "torch": torch.__version__.partition("+")[0],
        "torchao": torchao.__version__.partition("+")[0],
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        write(CORPUS, {case.id: as_data(fx_result(case), _samples(case)) for case in CASES}, versions)
        write(PARTS, {flow.id: fx_flow(flow) for flow in FLOWS}, versions)


def _samples(case: Case) -> int:
    return ALL if "outputs" in KNOWN_DIFFERENCES.get(case.id, set()) else SAMPLES


if __name__ == "__main__":
    main()
