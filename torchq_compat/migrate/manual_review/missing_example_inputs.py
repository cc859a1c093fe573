"""Calls that prepare without ``example_inputs``."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from torchq_compat.migrate.legacy_api.construct import Construct
from torchq_compat.migrate.legacy_api.fx_calls import fx_calls
from torchq_compat.migrate.manual_review.review import ManualReview
from torchq_compat.migrate.source.parsed_source import ParsedSource
from torchq_compat.migrate.source.sites import Site

__all__ = ["REVIEW"]


PREPARING = ("prepare_fx", "prepare_qat_fx")


def find(source: ParsedSource) -> Iterator[Site]:
    for call in fx_calls(source):
        if call.function not in PREPARING or call.has_stars:
            continue
        arg = call.arg("example_inputs")
        if arg is None:
            refusal = "torch.export captures the model by running it once"
        elif isinstance(arg.value, cst.Dict):
            refusal = "before torch 1.13 the third argument was a custom config; now it is example_inputs"
        else:
            continue
        yield Site("TQ201", source.start(call.node), call.function, refusal=refusal)


CONSTRUCT = Construct(
    code="TQ201",
    title="missing example_inputs",
    becomes="a tuple with one example of every argument",
    guide="""\
FX asks for `example_inputs` since torch 1.13; torch.export captures the model by running it. Give a tuple
with one example of every argument. If the third argument is a dict, it is the custom config of the older
signature: pass it as `prepare_custom_config`.
""",
)

REVIEW = ManualReview(CONSTRUCT, find)
