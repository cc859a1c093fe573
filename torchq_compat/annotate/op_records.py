"""Records on nodes how a QConfigMapping selects their op, so that convert can apply another mapping to it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn
from torch.fx import Node

from torchq_compat.capture.origins import Origin
from torchq_compat.config.qconfig_mappings import QConfigRules
from torchq_compat.qspecs.selectors import Selection, select_for_function, select_for_module
from torchq_compat.support import metadata

__all__ = ["OpRecord", "module_record", "op_record", "write_op_records"]


@dataclass(frozen=True)
class OpRecord:
    """An op, or the op of a fused pattern whose QConfig applies to the pattern.

    Attributes:
        label: the path in the decision about the op.
        origin: the origin of the op.
        call_index: how many calls of the same type the same module made before.
    """

    label: str
    origin: Origin
    call_index: int

    def select(self, rules: QConfigRules) -> Selection:
        """Return the QConfig that ``rules`` give the op."""
        origin = self.origin
        if origin.is_module_call:
            return select_for_module(rules, origin.module_type, origin.module_path, self.call_index)
        return select_for_function(
            rules, origin.object_types, origin.module_type, origin.module_path, self.call_index
        )


def module_record(module_type: type[nn.Module], path: str) -> OpRecord:
    """Return the record of a module that is one call in the graph."""
    return OpRecord(path, Origin(path, path, module_type, (module_type,), is_module_call=True), 0)


def write_op_records(records: Iterable[tuple[Node, OpRecord]]) -> None:
    """Put each record on its node."""
    for node, record in records:
        metadata.OP.write(node, record)


def op_record(node: Node) -> OpRecord | None:
    """Return the record that prepare wrote on ``node``; None if the node is no op of the model."""
    return metadata.OP.of(node)
