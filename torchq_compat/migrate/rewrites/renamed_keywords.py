"""Keywords that torch 1.13 renamed: ``qconfig_dict=`` -> ``qconfig_mapping=`` and their kin."""

from __future__ import annotations

from collections.abc import Iterator

from torchq_compat.migrate.fx_calls import fx_calls
from torchq_compat.migrate.legacy_names import KEYWORDS
from torchq_compat.migrate.parsed_source import ParsedSource
from torchq_compat.migrate.rewrites.rewrite import Rewrite
from torchq_compat.migrate.sites import Site
from torchq_compat.migrate.text_edits import Edit

__all__ = ["REWRITE"]

#: Renamed too, but there is nothing to give it to: see ``findings_for_people``.
NOT_CARRIED_OVER = "_equalization_config"


def find(source: ParsedSource) -> Iterator[Site]:
    for call in fx_calls(source):
        given = {arg.keyword.value for arg in call.node.args if arg.keyword is not None}
        for arg in call.node.args:
            keyword = arg.keyword
            new = KEYWORDS.get(keyword.value) if keyword is not None else None
            if keyword is None or new not in call.parameters or new == NOT_CARRIED_OVER:
                continue
            start = source.start(keyword)
            refusal = f"{new} is given too" if new in given else ""
            edits = () if refusal else (Edit(start, source.end(keyword), new),)
            yield Site("TQ107", start, f"{keyword.value}=", edits, refusal=refusal)


REWRITE = Rewrite("renamed-keywords", "TQ107", "qconfig_dict= and its kin get the names of torch 1.13", find)
