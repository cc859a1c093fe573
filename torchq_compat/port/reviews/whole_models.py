"""Find quantized models that are pickled whole."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from torchq_compat.port.constructs import Construct, Site
from torchq_compat.port.legacy_api.fx_calls import fx_call, last_value
from torchq_compat.port.reviews.review import ManualReview
from torchq_compat.port.source.parsed import ParsedSource


def find(source: ParsedSource) -> Iterator[Site]:
    """Yield ``torch.save(model)`` and ``torch.save({"model": model})`` of a prepared or converted model."""
    for call in source.nodes(cst.Call):
        if source.names(call.func) != {"torch.save"} or not call.args:
            continue
        saved = call.args[0].value
        values = [e.value for e in saved.elements] if isinstance(saved, cst.Dict) else [saved]
        if any(_is_made(source, value, call) for value in values):
            refusal = "a quantized model cannot be pickled; where it is loaded has to change with it"
            yield Site("TQ205", source.start(call), source.code(call), refusal=refusal)


def _is_made(source: ParsedSource, model: cst.BaseExpression, at: cst.CSTNode) -> bool:
    value = last_value(source, model, at) if isinstance(model, cst.Name) else model
    made = fx_call(source, value)
    return made is not None and made.function != "fuse_fx"


CONSTRUCT = Construct(
    code="TQ205",
    title="saving whole models",
    becomes="model.state_dict(), or torch.export.save",
    guide="""\
`torch.save(model)` of a prepared or converted model raises here. Save `model.state_dict()`, or
`torch.export.save` an exported program, and change what loads it.
""",
)

REVIEW = ManualReview(CONSTRUCT, find)
