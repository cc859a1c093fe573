"""Find calls that prepare without ``example_inputs``."""

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
#: The keys of a custom config dict.
OLD_KEYS = (
    "standalone_module_name",
    "standalone_module_class",
    "float_to_observed_custom_module_class",
    "non_traceable_module_name",
    "non_traceable_module_class",
    "input_quantized_idxs",
    "output_quantized_idxs",
    "preserved_attributes",
    "additional_quant_pattern",
    "additional_fuser_method_mapping",
    "additional_qat_module_mapping",
)


def find(source: ParsedSource) -> Iterator[Site]:
    for call in fx_calls(source):
        if call.function not in PREPARING or call.has_stars:
            continue
        arg = call.arg("example_inputs")
        if arg is None:
            refusal = "torch.export captures the model by running it once"
        elif isinstance(arg.value, cst.Name) and arg.value.value == "None":
            refusal = "example_inputs is None; the first batch of the calibration loader will do"
        elif isinstance(arg.value, cst.Dict) and _is_config(arg.value):
            refusal = "before torch 1.13 the third argument was a custom config; now it is example_inputs"
        else:
            continue
        yield Site("TQ201", source.start(call.node), call.function, refusal=refusal)


def _is_config(value: cst.Dict) -> bool:
    """Return whether the keys of a dict are settings, and not the parameters of a model."""
    keys = [e.key for e in value.elements if isinstance(e, cst.DictElement)]
    names = [key.raw_value for key in keys if isinstance(key, cst.SimpleString)]
    return not names or all(name in OLD_KEYS for name in names)


CONSTRUCT = Construct(
    code="TQ201",
    title="missing example_inputs",
    becomes="a tuple with one example of every argument",
    guide="""\
FX asks for `example_inputs` since torch 1.13; torch.export captures the model by running it. Give a tuple
with one example of every argument. The first batch of the calibration loader will do, without its
targets. A custom config dict in third place is of the older signature: pass it as `prepare_custom_config`.
""",
)

REVIEW = ManualReview(CONSTRUCT, find)
