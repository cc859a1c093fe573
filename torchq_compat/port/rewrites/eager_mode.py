"""Rewrite the functions of ``torch.ao.quantization``'s eager static mode, however imported, to
``torchq_compat.quantize_eager``."""

from __future__ import annotations

from torchq_compat.port.constructs import Construct
from torchq_compat.port.legacy_api.moved_names import MovedNames
from torchq_compat.port.legacy_api.names import EAGER_FLOW, EAGER_MODE, FUSING
from torchq_compat.port.rewrites.declaration import Rewrite

CONSTRUCT = Construct(
    code="TQ117",
    title="eager static mode",
    becomes="the function of the same name in torchq_compat.quantize_eager",
    guide="""\
`prepare`, `prepare_qat`, `convert`, `quantize`, `quantize_qat`, `fuse_modules`, `fuse_modules_qat`,
`swap_module`, `propagate_qconfig_` and `add_quant_dequant` of `torch.ao.quantization` or
`torch.quantization`: the same names in `torchq_compat.quantize_eager`. Stubs, `FloatFunctional`, QConfigs and
observers stay where they are. See [eager mode](eager.md).
""",
)

REWRITE = Rewrite(
    name="eager-mode",
    construct=CONSTRUCT,
    summary="prepare, convert and related functions of eager mode come from torchq_compat.quantize_eager",
    # Only these names move; the rest of the modules stays.
    find=MovedNames("TQ117", (), EAGER_MODE).find,
    order=9,
    words=(*EAGER_FLOW, *FUSING),
)
