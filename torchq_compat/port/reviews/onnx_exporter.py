"""Find calls of the TorchScript ONNX exporter on a prepared or converted model."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from torchq_compat.port.constructs import Construct, Site
from torchq_compat.port.legacy_api.fx_calls import fx_call, last_value
from torchq_compat.port.reviews.review import ManualReview
from torchq_compat.port.source.parsed import ParsedSource

CODE = "TQ207"
OLD_EXPORTER = "torch.onnx.utils.export"
EXPORTERS = {"torch.onnx.export", OLD_EXPORTER}
REFUSAL = "the exporter on TorchScript has no ops for it; give dynamo=True and the reference conversion"


def find(source: ParsedSource) -> Iterator[Site]:
    for call in source.nodes(cst.Call):
        names = source.names(call.func)
        if not names or not names <= EXPORTERS or not call.args or not _is_old(call, names):
            continue
        model = call.args[0].value
        value = last_value(source, model, call) if isinstance(model, cst.Name) else model
        made = fx_call(source, value)
        if made is not None and made.function != "fuse_fx":
            yield Site(CODE, source.start(call), source.code(call.func), refusal=REFUSAL)


def _is_old(call: cst.Call, names: frozenset[str]) -> bool:
    """Return whether ``call`` exports through TorchScript; ``dynamo`` is True by default."""
    return names <= {OLD_EXPORTER} or any(
        arg.keyword is not None
        and arg.keyword.value == "dynamo"
        and isinstance(arg.value, cst.Name)
        and arg.value.value == "False"
        for arg in call.args
    )


CONSTRUCT = Construct(
    code=CODE,
    title="the ONNX exporter on TorchScript",
    becomes="torch.onnx.export(..., dynamo=True) of the reference conversion",
    guide="""\
`torch.onnx.export(model, ..., dynamo=False)` traces with TorchScript and fails on a captured graph. Leave
`dynamo` out: it is true by default, and what is written has the bits of `convert_to_reference_fx`.
""",
)

REVIEW = ManualReview(CONSTRUCT, find)
