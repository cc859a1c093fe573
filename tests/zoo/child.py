"""One model in a process of its own: ``python -m tests.zoo.child NAME`` prints its row as JSON."""

from __future__ import annotations

import json
import os
import resource
import sys

import torch

from tests.zoo.libraries import prepare_imports
from tests.zoo.measure import measure
from tests.zoo.registry import ZOO

__all__ = ["main"]

MEMORY = 12 * 2**30  # bytes


def main(name: str) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    os.nice(5)
    torch.set_num_threads(1)
    prepare_imports()
    print("\n" + json.dumps(measure(ZOO[name])))


if __name__ == "__main__":
    main(sys.argv[1])
