"""A model's row from a process of its own: a crash, an abort or a time limit is a row, too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

__all__ = ["row_of"]


def row_of(name: str, limit: float) -> dict[str, Any]:
    """Return the row of the model ``name``, with ``died`` if there is none; ends after ``limit`` seconds."""
    command = [sys.executable, "-m", "tests.zoo.child", name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        return {"model": name, "died": f"not done after {limit:.0f} s"}
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["nothing said"])[-1]
        return {"model": name, "died": f"exit status {done.returncode}: {last[:300]}"}
    row: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return row
