"""Views of the float model's modules in a prepared model: ``prepared.conv1.weight_fake_quant``, ``print``.

Legacy: FX's prepared model calls float modules and those of ``torch.ao.nn.qat``. A captured graph only reads
their parameters: a view holds them at the same path, and has the module's other attributes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from torch import nn
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e import fake_quantize

from torchq_compat.errors import ModuleAttributeError
from torchq_compat.graph.module_views import (
    MISSING,
    ModuleFacts,
    ModuleView,
    nodes_by_path,
    order_as_float_model,
    parent_of,
    stand_in_for,
)
from torchq_compat.qspecs.observers import LegacyFakeQuantizeAdapter
from torchq_compat.support.torch_ao import fake_quantize as legacy_fake_quantize

__all__ = ["PreparedView", "install_prepared_views"]

FAKE_QUANTIZE = "weight_fake_quant"


def install_prepared_views(prepared: GraphModule, facts: Mapping[str, ModuleFacts]) -> None:
    """Put a view at every path of ``facts`` that has ops in the graph and no module of its own."""
    with_ops = nodes_by_path(prepared)
    for path, fact in facts.items():
        parent, name = parent_of(prepared, path) if path in with_ops else (None, "")
        standing = None if parent is None else parent._modules.get(name)
        is_taken = standing is not None and type(standing) is not nn.Module
        if parent is None or is_taken or (standing is None and name in vars(parent)):
            continue
        view = _view_class(fact.kind)(prepared, path, fact)
        if standing is not None:
            stand_in_for(standing, view)
        view.training = prepared.training
        parent._modules[name] = view
    order_as_float_model(prepared, facts)


class PreparedView(ModuleView):
    """A stand-in for a module of the float model in the prepared model, with its parameters."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: the ops of the module are in the graph.

        Raises:
            ModuleAttributeError: always.
        """
        _, path, facts = vars(self)["_view"]
        raise ModuleAttributeError(
            f"{path!r} of the prepared model is a view of what was {facts.kind}: it cannot be called.",
            hint="call the whole model; its graph computes what the module computed.",
        )

    def __setattr__(self, name: str, value: Any) -> None:
        """Put a fake-quantize at ``weight_fake_quant`` where the graph calls that of the weight, as FX's QAT
        modules do."""
        owner, path, _ = vars(self).get("_view", (None, "", None))
        prepared: Any = None if owner is None or name != FAKE_QUANTIZE else owner()
        target = None if prepared is None else _weight_observer(prepared, path)
        if target is None:
            super().__setattr__(name, value)
        else:
            prepared.set_submodule(target, value)

    def extra_repr(self) -> str:
        return str(vars(self)["_view"][2].shown)

    def _answer(self, owner: GraphModule, path: str, name: str) -> Any:
        return _weight_fake_quantize(owner, path) if name == FAKE_QUANTIZE else MISSING

    def _refusal(self, path: str, kind: str, name: str) -> ModuleAttributeError:
        return ModuleAttributeError(
            f"{path!r} of the prepared model is a view of what was {kind}: it has no {name!r}.",
            hint="it has the float module's settings and parameters, and weight_fake_quant where its weight "
            "is fake-quantized; explain(model) has the rest.",
        )


@cache
def _view_class(name: str) -> type[PreparedView]:
    return type(name, (PreparedView,), {"__module__": __name__})


def _weight_fake_quantize(prepared: GraphModule, path: str) -> Any:
    """Return the fake-quantize of the weight of ``path``; before a batch norm, that of the scaled weight.

    A fake-quantize of the user's own class is returned as the user made it, without its adapter.
    """
    target = _weight_observer(prepared, path)
    module = None if target is None else prepared.get_submodule(target)
    if isinstance(module, LegacyFakeQuantizeAdapter):
        return module.legacy
    return MISSING if module is None else module


def _weight_observer(prepared: GraphModule, path: str) -> str | None:
    """Return the path of the fake-quantize of the weight of ``path``; None if there is none."""
    weight = f"{path}.weight"
    for node in prepared.graph.nodes:
        if node.op == "call_module" and _is_of_weight(node, weight):
            module = prepared.get_submodule(str(node.target))
            if isinstance(module, (fake_quantize.FakeQuantizeBase, legacy_fake_quantize.FakeQuantizeBase)):
                return str(node.target)
    return None


def _is_of_weight(node: Node, weight: str) -> bool:
    """Return whether ``node`` reads ``weight``, directly or as the first factor of a product."""
    source = node.args[0]
    while isinstance(source, Node) and source.op == "call_function" and source.args:
        source = source.args[0]
    return isinstance(source, Node) and source.op == "get_attr" and source.target == weight
