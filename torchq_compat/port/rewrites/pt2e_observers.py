"""Rewrite observers of torch.ao in a file for PT2E to torchao's: its prepare fails on torch.ao's, or drops
them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torchq_compat.port.constructs import Site
from torchq_compat.port.finders import Finder
from torchq_compat.port.legacy_api.fx_calls import uses_fx
from torchq_compat.port.legacy_api.moved_names import MovedNames
from torchq_compat.port.legacy_api.names import PT2E_OBSERVERS, new_module
from torchq_compat.port.source.parsed import ParsedSource

CODE = "TQ115"
PT2E = "torchao.quantization.pt2e"
OURS = "torchq_compat.pt2e"
PREPARES = frozenset(
    f"{module}.{name}"
    for module in (f"{PT2E}.quantize_pt2e", OURS)
    for name in ("prepare_pt2e", "prepare_qat_pt2e")
)
MOVED = MovedNames(CODE, (), PT2E_OBSERVERS)


def find(source: ParsedSource) -> Iterator[Site]:
    used = {new_module(name) or name for name in source.used_names()}
    if not any(f"{name}.".startswith((f"{PT2E}.", f"{OURS}.")) for name in used):
        return
    legacy_configuration = uses_fx(source) or any("qconfig" in name.lower() for name in used)
    if not legacy_configuration:
        yield from MOVED.find(source)
    elif PREPARES & used:
        for site in MOVED.find(source):
            yield replace(
                site,
                edits=(),
                imports=(),
                refusal="the file also has QConfigs, which take torch.ao's; the specs of prepare_pt2e take "
                "torchao's",
            )


REWRITE = Finder(CODE, find)
