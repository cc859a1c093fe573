"""The base class of the package's own custom modules, which consist of graphs of parts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from torchq_compat.custom_modules.parts.part_specs import PartSpecs
from torchq_compat.opaque_calls.layouts import CallLayout
from torchq_compat.opaque_calls.opaque_module import OpaqueModule
from torchq_compat.opaque_calls.tensor_labels import input_labels
from torchq_compat.qspecs.qparams import PerTensorQParams, QParams
from torchq_compat.support.quantized_tensors import as_float
from torchq_compat.support.upstream import pytree

__all__ = ["PartOwner"]


class PartOwner(OpaqueModule, ABC):
    """An observed or converted module that consists of prepared or converted graphs.

    Attributes:
        specs: the specs of the parts.
        module_path: the module's path in the model, for messages.
    """

    #: A float class, if the arguments of its ``forward`` are the graphs' inputs, by name.
    inputs_named_as: ClassVar[type[nn.Module] | None] = None
    specs: PartSpecs
    qconfig: Any
    module_path: str

    def __init__(self) -> None:
        # Not super().__init__: the legacy classes would make float layers with random weights.
        nn.Module.__init__(self)
        self.module_path = ""
        self.opaque_layouts: list[CallLayout] = []

    def forward(self, *args: Any, opaque_layout: int | None = None, **kwargs: Any) -> Any:
        """Run a call. The caller may be a user's quantized module, which may pass quantized tensors of
        torch.ao."""
        if opaque_layout is None:
            args, kwargs = pytree.tree_map_only(Tensor, _float_values, (args, kwargs))
        return super().forward(*args, opaque_layout=opaque_layout, **kwargs)

    @abstractmethod
    def graphs(self) -> Iterator[tuple[str, GraphModule]]:
        """Yield (path inside the module, graph of parts)."""

    @abstractmethod
    def result_dtypes(self, count: int) -> tuple[torch.dtype | None, ...]:
        """Return the quantized dtype of each of the ``count`` flat results of a call; None for floats."""

    def named_input_qparams(self) -> dict[str, PerTensorQParams]:
        """Return the qparams of the graphs' inputs, by name, for inputs that have the same known qparams in
        every call."""
        if self.inputs_named_as is None:
            return {}
        found: dict[str, set[QParams | None]] = {}
        for layout in self.opaque_layouts:
            labels = input_labels(self.inputs_named_as, layout.inputs)
            for label, qparams in zip(labels, layout.input_qparams, strict=bool(layout.input_qparams)):
                found.setdefault(label, set()).add(qparams)
        single = {label: all_qparams.pop() for label, all_qparams in found.items() if len(all_qparams) == 1}
        return {label: qparams for label, qparams in single.items() if isinstance(qparams, PerTensorQParams)}

    def take_over(self, other: PartOwner) -> None:
        """Take over the specs, path, layouts and mode of ``other``, which this module replaces."""
        self.specs = other.specs
        self.module_path = other.module_path
        self.opaque_layouts = list(other.opaque_layouts)
        self.train(other.training)


def _float_values(tensor: Tensor) -> Tensor:
    return as_float(tensor)
