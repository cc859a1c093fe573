"""Rewrite private functions of ``torch.ao.quantization.fx.lstm_utils`` to ``torchq_compat``'s."""

from __future__ import annotations

from torchq_compat.port.constructs import Construct
from torchq_compat.port.legacy_api.moved_names import MovedNames
from torchq_compat.port.rewrites.declaration import Rewrite
from torchq_compat.port.source.moved_tables import MOVED_FUNCTIONS

ROWS = tuple(row for row in MOVED_FUNCTIONS if row.replacement == "torchq_compat.lstm_utils")

CONSTRUCT = Construct(
    code="TQ102",
    title="LSTM part helpers",
    becomes="the public function in torchq_compat.lstm_utils",
    guide="""\
`_get_lstm_with_individually_observed_parts` and `_get_reference_quantized_lstm_module`: the public names in
`torchq_compat.lstm_utils`. The file's own uses are renamed; where another file takes the private name from
this one, or `__all__` lists it, the import keeps it with `as`.
""",
)

REWRITE = Rewrite(
    name="lstm-part-helpers",
    construct=CONSTRUCT,
    summary="_get_lstm_with_individually_observed_parts and related functions get their public names",
    find=MovedNames("TQ102", ROWS).find,
    order=90,
)
