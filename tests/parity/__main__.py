"""``python -m tests.parity``: run FX and write down its results."""

from __future__ import annotations

import warnings

import torch
import torchao

from tests.parity.cases import CASES
from tests.parity.comparison import fx_result
from tests.parity.fx_parts import FLOWS, fx_flow
from tests.parity.fx_results import CORPUS, PARTS, as_data, write


def main() -> None:
    versions = {
        "torch": torch.__version__.partition("+")[0],
        "torchao": torchao.__version__.partition("+")[0],
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        write(CORPUS, {case.id: as_data(fx_result(case)) for case in CASES}, versions)
        write(PARTS, {flow.id: fx_flow(flow) for flow in FLOWS}, versions)


if __name__ == "__main__":
    main()
