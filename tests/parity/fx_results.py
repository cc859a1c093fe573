"""The results of FX for a case, as numbers: live, or as stored in this folder.

    python -m tests.parity

runs FX on every case and writes ``fx_results.json`` (the corpus) and ``fx_parts.json`` (LSTMs observed part
by part) again; ``python -m tests.zoo`` writes those of the zoo, ``migration/zoo.json``. The stored results
are compared in every run, also if torch has no FX engine any more.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

__all__ = [
    "ALL",
    "CORPUS",
    "PARTS",
    "SAMPLES",
    "FxOutput",
    "FxResult",
    "as_data",
    "from_data",
    "stored",
    "write",
]

CORPUS = Path(__file__).with_name("fx_results.json")
PARTS = Path(__file__).with_name("fx_parts.json")
#: Stored elements of an output, evenly spread; ALL for an output that is listed to differ, perhaps in few
#: elements.
SAMPLES = 32
ALL = 10**6
DIGITS = 7

Op = tuple[str, str]


@dataclass(frozen=True)
class FxOutput:
    """A tensor that FX's converted model returned.

    Attributes:
        step: its quantization step.
        mean: of all elements.
        values: every ``stride``-th element, flattened.
    """

    step: float
    shape: tuple[int, ...]
    mean: float
    values: tuple[float, ...]
    stride: int = 1

    @classmethod
    def of(cls, tensor: Tensor, step: float) -> FxOutput:
        values = tuple(tensor.detach().double().flatten().tolist())
        return cls(step, tuple(tensor.shape), float(tensor.double().mean()), values)

    def sampled(self, samples: int) -> FxOutput:
        """Return the part that is stored: at least ``samples`` elements, or all."""
        stride = max(1, len(self.values) // samples)
        return FxOutput(self.step, self.shape, self.mean, self.values[::stride], stride)

    def share_within_one_step(self, tensor: Tensor) -> float:
        """Return the share of stored elements within a step of ``tensor``'s; 0 for another shape or mean."""
        other = FxOutput.of(tensor, self.step)
        if other.shape != self.shape or abs(other.mean - self.mean) > 0.5 * self.step:
            return 0.0
        pairs = zip(self.values, other.values[:: self.stride], strict=True)
        return sum(abs(a - b) <= 1.01 * self.step for a, b in pairs) / len(self.values)


@dataclass(frozen=True)
class FxResult:
    """The result of FX for a model.

    Attributes:
        ops: (path, function name or "" for a module) of the quantized ops.
        qparams: distinct (scale, zero point) of activations, sorted.
    """

    ops: Counter[Op]
    qparams: tuple[tuple[float, int], ...]
    outputs: tuple[FxOutput, ...]


def as_data(result: FxResult | None, samples: int = SAMPLES) -> Any:
    """Return plain values to store; None if FX refuses."""
    if result is None:
        return None
    return {
        "ops": [f"{path}:{name}" for path, name in sorted(result.ops.elements())],
        "qparams": [[_short(scale), zero_point] for scale, zero_point in result.qparams],
        "outputs": [
            {
                "step": _short(output.step),
                "shape": list(output.shape),
                "mean": _short(output.mean),
                "stride": output.stride,
                "values": [_short(value) for value in output.values],
            }
            for output in (output.sampled(samples) for output in result.outputs)
        ],
    }


def from_data(data: Mapping[str, Any] | None) -> FxResult | None:
    """Invert ``as_data``."""
    if data is None:
        return None
    ops = Counter((path, name) for path, _, name in (op.rpartition(":") for op in data["ops"]))
    qparams = tuple((scale, zero_point) for scale, zero_point in data["qparams"])
    outputs = tuple(
        FxOutput(out["step"], tuple(out["shape"]), out["mean"], tuple(out["values"]), out["stride"])
        for out in data["outputs"]
    )
    return FxResult(ops, qparams, outputs)


def stored(file: Path) -> dict[str, Any]:
    results: dict[str, Any] = json.loads(file.read_text())["results"]
    return results


def write(file: Path, results: Mapping[str, Any], versions: Mapping[str, str]) -> None:
    """Return text with one line for each result, so that a change is one line of a diff."""
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in results.items())
    head = f'"made_by": "python -m tests.parity", "versions": {json.dumps(dict(versions))}'
    file.write_text(f'{{\n {head},\n "results": {{\n{lines}\n }}\n}}\n')


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
