"""Rewrite ``torch.ao.quantization.quantize_dynamic``, however imported, to
``torchq_compat.quantize_dynamic``."""

from __future__ import annotations

from torchq_compat.port.constructs import Construct
from torchq_compat.port.legacy_api.moved_names import MovedNames
from torchq_compat.port.legacy_api.names import EAGER_FUNCTIONS
from torchq_compat.port.rewrites.declaration import Rewrite

CONSTRUCT = Construct(
    code="TQ111",
    title="quantize_dynamic",
    becomes="torchq_compat.quantize_dynamic",
    guide="""\
`quantize_dynamic` of `torch.ao.quantization` or `torch.quantization`: the same function, arguments and
numbers, eager in, eager out; LSTM, GRU, RNN and their cells run in the native loop.
""",
)

REWRITE = Rewrite(
    name="quantize-dynamic",
    construct=CONSTRUCT,
    summary="quantize_dynamic comes from torchq_compat",
    # Only this name moves; the rest of the modules stays.
    find=MovedNames("TQ111", (), EAGER_FUNCTIONS).find,
    order=8,
)
