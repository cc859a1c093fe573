"""Rewrite names that only moved, however imported, to the modules of this package, or of torchao, that have
them.

Each is a row of its table; where others names of a legacy module stay, the rows are guests.
"""

from collections.abc import Iterator
from dataclasses import replace

from torchq_compat.port.constructs import Site
from torchq_compat.port.finders import Finder
from torchq_compat.port.legacy_api import names as legacy
from torchq_compat.port.legacy_api.fx_calls import uses_fx
from torchq_compat.port.legacy_api.moved_names import MovedNames
from torchq_compat.port.source.moved_tables import FUNCTIONS, MOVED_CLASSES, MOVED_FUNCTIONS
from torchq_compat.port.source.parsed import ParsedSource

PARTS = tuple(row for row in MOVED_FUNCTIONS if row.replacement == "torchq_compat.lstm_utils")
FX_ROWS = tuple(row for row in MOVED_FUNCTIONS if row.replacement == "torchq_compat.quantize_fx")
#: These names never were here, but a docstring of FX says so, and scripts copy it.
FX_PACKAGES = frozenset(row.legacy.rpartition(".")[0] for row in FX_ROWS)
PT2E = "torchao.quantization.pt2e"
OURS = "torchq_compat.pt2e"
PREPARES = frozenset(
    f"{module}.{name}"
    for module in (f"{PT2E}.quantize_pt2e", OURS)
    for name in ("prepare_pt2e", "prepare_qat_pt2e")
)
MOVED_OBSERVERS = MovedNames("TQ115", (), legacy.PT2E_OBSERVERS)


def find_functions(source: ParsedSource) -> Iterator[Site]:
    yield from MovedNames("TQ101", FX_ROWS).find(source)
    for _, alias, full in source.names_from():
        package, _, name = full.rpartition(".")
        if package in FX_PACKAGES and name in FUNCTIONS:
            refusal = f"{package} never had it; import {name} from torchq_compat.quantize_fx"
            yield Site("TQ101", source.start(alias), full, refusal=refusal)


def find_observers(source: ParsedSource) -> Iterator[Site]:
    """Yield observers of torch.ao in a file for PT2E, whose prepare fails on them, or drops them."""
    used = {legacy.new_module(name) or name for name in source.used_names()}
    if not any(f"{name}.".startswith((f"{PT2E}.", f"{OURS}.")) for name in used):
        return
    legacy_configuration = uses_fx(source) or any("qconfig" in name.lower() for name in used)
    if not legacy_configuration:
        yield from MOVED_OBSERVERS.find(source)
    elif PREPARES & used:
        for site in MOVED_OBSERVERS.find(source):
            yield replace(
                site,
                edits=(),
                imports=(),
                refusal="the file also has QConfigs, which take torch.ao's; the specs of prepare_pt2e take "
                "torchao's",
            )


FX_FUNCTIONS = Finder("TQ101", find_functions)
LSTM_PART_HELPERS = Finder("TQ102", MovedNames("TQ102", PARTS).find)
CUSTOM_CONFIG_CLASSES = Finder("TQ103", MovedNames("TQ103", MOVED_CLASSES[:1], guests=MOVED_CLASSES[1:]).find)
QUANTIZE_DYNAMIC = Finder("TQ111", MovedNames("TQ111", (), legacy.EAGER_FUNCTIONS).find)
EAGER_STATIC_MODE = Finder(
    "TQ117", MovedNames("TQ117", (), legacy.EAGER_MODE).find, (*legacy.EAGER_FLOW, *legacy.FUSING)
)
OBSERVERS_IN_PT2E = Finder("TQ115", find_observers)
