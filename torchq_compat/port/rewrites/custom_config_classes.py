"""Rewrite ``torch.ao.quantization.fx.custom_config`` to ``torchq_compat.custom_config``: the same classes."""

from __future__ import annotations

from torchq_compat.port.constructs import Construct
from torchq_compat.port.legacy_api.moved_names import MovedNames
from torchq_compat.port.rewrites.declaration import Rewrite
from torchq_compat.port.source.moved_tables import MOVED_CLASSES

CONSTRUCT = Construct(
    code="TQ103",
    title="custom config classes",
    becomes="the same class from torchq_compat.custom_config",
    guide="""\
`PrepareCustomConfig`, `ConvertCustomConfig`, `FuseCustomConfig`: the same classes, from
`torchq_compat.custom_config`.
""",
)

REWRITE = Rewrite(
    name="custom-config-classes",
    construct=CONSTRUCT,
    summary="PrepareCustomConfig and related classes come from torchq_compat.custom_config",
    find=MovedNames("TQ103", MOVED_CLASSES[:1], guests=MOVED_CLASSES[1:]).find,
    order=20,
)
