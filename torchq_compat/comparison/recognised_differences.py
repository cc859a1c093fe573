"""The differences from FX that the guide lists and ``compare`` can recognise."""

from __future__ import annotations

from typing import NamedTuple

from torchq_compat.port.constructs import GUIDE


class Known(NamedTuple):
    """An anchor of the guide, and the explanation in one sentence."""

    anchor: str
    why: str

    @property
    def link(self) -> str:
        return f"{GUIDE}#{self.anchor}" if self.anchor else ""


SAME_QPARAMS = Known(
    "same-qparams-for-all-directions",
    "FX quantizes what it concatenates or stacks with the qparams of the first piece, so the other "
    "direction or layer saturates or loses steps; here each keeps its own qparams.",
)
SHARED_OBSERVER = Known(
    "observer-behind-a-custom-module",
    "FX lets an op behind a custom module share the observer of that module's input, whose range is "
    "another; here it keeps the range of its own values.",
)
FIXED_INPUT = Known(
    "input-of-fixed-qparams-ops",
    "FX quantizes the input of an op with fixed qparams, coming from a float producer, with the op's own "
    "output qparams and cuts it; here the input has the global QConfig's observer.",
)
GATE_INPUT = Known(
    "input-of-gates",
    "FX quantizes a gate's input with the gate's output qparams; here the input is what the sum before "
    "yields.",
)
FIXED_PARTS = Known(
    "tanh-of-the-cell-state",
    "In an individually observed cell FX observes what has no constructor with the QConfig's activation "
    "observer; "
    "here sigmoid and tanh have fixed qparams, as in the default cell.",
)
TRAINED_RANGE = Known(
    "range-of-a-fake-quantize",
    "A fake-quantize clamps to the range it was given, 0..127 say. FX's converted model clamps to the "
    "dtype's; here the "
    "range stays the one the values were clamped to.",
)
DIFFERENT_RANGES = Known(
    "moving-averages",
    "The observer's range is narrower than the values: a moving average settles on the mean range of a step "
    "or batch, a histogram cuts rare extremes.",
)
ROUNDING = Known(
    "rounding",
    "torch.quantize_per_tensor and quantized_decomposed.quantize_per_tensor round a few values to different "
    "integers, and what follows carries the step on.",
)
FX_RAISES = Known(
    "what-fx-cannot-run", "FX cannot run every model; the other side is measured against float alone."
)
LOWERING = Known("", "Only FX's reference conversion is compared; its size and latency are not known.")
ONE_SIDE = Known("known-differences-from-fx", "")
LEFT_FLOAT = Known("known-differences-from-fx", "")
NOT_EXPLAINED = Known(
    "",
    "No difference that the guide explains is recognised here; migration/guide/differences.md lists rarer "
    "ones, by model and configuration. If the SQNR here is the lower one, it is worth a report.",
)
#: The differences with a section in the guide.
ALL = tuple(known for known in tuple(globals().values()) if isinstance(known, Known) and known.anchor)
