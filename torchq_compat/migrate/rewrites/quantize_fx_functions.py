"""``torch.ao.quantization.quantize_fx`` -> ``torchq_compat.quantize_fx``: the functions, however imported."""

from __future__ import annotations

from torchq_compat.migrate.legacy_api.construct import Construct
from torchq_compat.migrate.legacy_api.legacy_names import MOVED_FUNCTIONS
from torchq_compat.migrate.legacy_api.moved_names import MovedNames
from torchq_compat.migrate.rewrites.declaration import Rewrite

__all__ = ["REWRITE"]

ROWS = tuple(row for row in MOVED_FUNCTIONS if row.replacement == "torchq_compat.quantize_fx")

CONSTRUCT = Construct(
    code="TQ101",
    title="quantize_fx functions",
    becomes="the function of the same name in torchq_compat.quantize_fx",
    guide="""\
`prepare_fx`, `prepare_qat_fx`, `convert_fx`, `convert_to_reference_fx` and `fuse_fx` of
`torch.ao.quantization.quantize_fx` or `torch.quantization.quantize_fx`, imported by name, as a module,
under an alias or spelled out: the same names in `torchq_compat.quantize_fx`. Left: `import *`, which also
brings names that did not move, and a module that is passed on as an object.
""",
)

REWRITE = Rewrite(
    name="quantize-fx-functions",
    construct=CONSTRUCT,
    summary="prepare_fx, convert_fx and related functions come from torchq_compat.quantize_fx",
    find=MovedNames("TQ101", ROWS).find,
    order=80,
)
