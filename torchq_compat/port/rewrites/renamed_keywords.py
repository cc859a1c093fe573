"""Rewrite keywords that torch 1.13 renamed: ``qconfig_dict=`` to ``qconfig_mapping=``, and related ones."""

from collections.abc import Iterator

from torchq_compat.port.constructs import Edit, Site
from torchq_compat.port.finders import Finder
from torchq_compat.port.legacy_api.fx_calls import fx_calls
from torchq_compat.port.source.parsed import ParsedSource
from torchq_compat.read.old_forms import KEYWORDS

#: This one was renamed too, but has no counterpart: see ``manual_review.equalization``.
NOT_CARRIED_OVER = "_equalization_config"


def find(source: ParsedSource) -> Iterator[Site]:
    for call in fx_calls(source):
        given = {arg.keyword.value for arg in call.node.args if arg.keyword is not None}
        for arg in call.node.args:
            keyword = arg.keyword
            new = KEYWORDS.get(keyword.value) if keyword is not None else None
            if keyword is None or new not in call.parameters or new == NOT_CARRIED_OVER:
                continue
            site = Site("TQ107", source.start(keyword), f"{keyword.value}=")
            edit = Edit(site.offset, source.end(keyword), new)
            yield site.settled(f"{new} is given too" if new in given else "", (edit,))


REWRITE = Finder("TQ107", find)
