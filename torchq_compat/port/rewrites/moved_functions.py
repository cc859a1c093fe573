"""Rewrite names that only moved, however imported, to the modules of this package that have them.

Each is a row of its table; where others names of a legacy module stay, the rows are guests.
"""

from __future__ import annotations

from torchq_compat.port.finders import Finder
from torchq_compat.port.legacy_api.moved_names import MovedNames
from torchq_compat.port.legacy_api.names import EAGER_FLOW, EAGER_FUNCTIONS, EAGER_MODE, FUSING
from torchq_compat.port.source.moved_tables import MOVED_CLASSES, MOVED_FUNCTIONS

PARTS = tuple(row for row in MOVED_FUNCTIONS if row.replacement == "torchq_compat.lstm_utils")

LSTM_PART_HELPERS = Finder("TQ102", MovedNames("TQ102", PARTS).find)
CUSTOM_CONFIG_CLASSES = Finder("TQ103", MovedNames("TQ103", MOVED_CLASSES[:1], guests=MOVED_CLASSES[1:]).find)
QUANTIZE_DYNAMIC = Finder("TQ111", MovedNames("TQ111", (), EAGER_FUNCTIONS).find)
EAGER_STATIC_MODE = Finder("TQ117", MovedNames("TQ117", (), EAGER_MODE).find, (*EAGER_FLOW, *FUSING))
