"""Views of the float model's modules in a prepared or converted model, such as ``q.conv1.weight()``."""

from __future__ import annotations

import re
import sys
import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NoReturn, Self, SupportsIndex

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils.hooks import RemovableHandle
from torchao.quantization.pt2e import fake_quantize

from torchq_compat.annotate.batch_norm import set_momentum
from torchq_compat.capture.origins import is_fx_leaf
from torchq_compat.capture.training import freeze_batch_norm, frozen_modules, module_of, set_training
from torchq_compat.errors import ModuleAttributeError
from torchq_compat.model.view_hooks import HOOK_STATE, HOOKED, check_hookable, has_hooks
from torchq_compat.ops import those
from torchq_compat.read.observers import LegacyFakeQuantizeAdapter
from torchq_compat.read.qdq import DEQUANTIZE_DYNAMIC, DEQUANTIZE_PER_CHANNEL, DEQUANTIZES, QUANTIZE
from torchq_compat.support.dtypes import LEGACY_DTYPES
from torchq_compat.support.graph_nodes import attribute_of, called_modules, module_path_of, source_of
from torchq_compat.support.quantized_tensors import of_integers, of_integers_per_channel
from torchq_compat.support.sharded import is_of_fsdp
from torchq_compat.support.torch_ao import fake_quantize as legacy_fake_quantize
from torchq_compat.support.torch_ao import (
    fused_module,
    get_default_dynamic_quant_module_mappings,
    get_default_qat_module_mappings,
    get_default_static_quant_module_mappings,
    intrinsic,
)

# Views of the float model's modules in a converted model: ``q.conv1.weight()``, ``.scale``, ``print(q)``.
#
# Legacy: modules of ``torch.ao.nn.quantized``. A captured graph has no modules, so a view is put at the
# path of each float module. A view holds only the tensors that the graph has at that path, and reads the
# rest from the graph.


#: Types of a float module's attributes that are settings: neither tensors nor containers of tensors.
SETTINGS = (int, float, str, bool, tuple, type(None))
#: Beginning of a class name -> class of a float module -> that of FX's converted one.
QUANTIZED_CLASSES: dict[str, Mapping[Any, type[nn.Module]]] = {
    "DynamicQuantized": get_default_dynamic_quant_module_mappings(),
    "Quantized": get_default_static_quant_module_mappings(),
}
FUSED_RELU = re.compile(r"(?P<op>Conv)(?P<rank>\dd)|(?P<linear>Linear)")


@dataclass(frozen=True)
class ModuleFacts:
    """Facts about a float module.

    Attributes:
        kind: the name of its class.
        settings: its plain public attributes.
        shown: its ``extra_repr()``.
        of_class: its class.
        also: the other paths of the same module.
    """

    kind: str
    settings: Mapping[str, Any]
    shown: str
    of_class: type[nn.Module] = nn.Module
    also: tuple[str, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleFacts:
        return self


def describe_modules(model: nn.Module) -> dict[str, ModuleFacts]:
    """Return path -> facts, for all modules of ``model`` that FX does not trace into, such as torch.nn's, and
    for torch.ao's fused ones, which have those of the first module in them."""
    result = {}
    paths: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(path)
    for path, module in model.named_modules():
        is_leaf = is_fx_leaf(module) and not isinstance(module, (nn.ModuleList, nn.ModuleDict))
        if path and (is_leaf or isinstance(module, fused_module)):
            first: nn.Module = module[0] if isinstance(module, fused_module) else module
            settings = {
                name: value
                for name, value in vars(first).items()
                if not name.startswith("_") and isinstance(value, SETTINGS) and name != "training"
            }
            result[path] = ModuleFacts(
                type(module).__name__.replace("Bn", ""),
                settings,
                first.extra_repr(),
                type(module),
                tuple(paths[module][1:]),
            )
    return result


def install_views(converted: GraphModule, facts: Mapping[str, ModuleFacts]) -> None:
    """Put a view at every path of ``facts`` that has no module of its own in ``converted``."""
    nodes = nodes_by_path(converted)
    kinds = {path: _kind_of(fact, _nodes_at(nodes, path)) for path, fact in facts.items()}
    for view in _put_views(converted, facts, kinds, is_prepared=False):
        path = vars(view)["_view"][1]
        vars(view)["_stands_for"] = _converted_class(facts[path].of_class, kinds[path])
        bias = view._parameters.get("bias")
        if "Quantized" in type(view).__name__ and bias is not None and not isinstance(bias, BiasParameter):
            view._parameters["bias"] = BiasParameter(bias.data, bias.requires_grad)


def _put_views(
    model: GraphModule, facts: Mapping[str, ModuleFacts], kinds: Mapping[str, str], *, is_prepared: bool
) -> list[ModuleView]:
    """Put a view, of a class named in ``kinds``, at every path that has one, and no module of its
    own; return the views."""
    views = []
    for path, fact in facts.items():
        parent, name = parent_of(model, path) if kinds[path] else (None, "")
        standing = None if parent is None else parent._modules.get(name)
        is_plain = standing is None or type(standing) in CONTAINERS or isinstance(standing, ModuleView)
        if parent is None or not is_plain or (standing is None and name in vars(parent)):
            continue
        view = _view_class(kinds[path], is_prepared)(model, path, fact)
        if standing is not None:
            # The view gets the parameters and buffers themselves, which the graph reads at this path.
            stand_in_for(standing, view)
        view.training = model.training
        parent._modules[name] = view
        if type(parent) is nn.Module:
            parent.__class__ = Container
        views.append(view)
    order_as_float_model(model, facts)
    return views


def order_as_float_model(model: nn.Module, facts: Mapping[str, ModuleFacts]) -> None:
    """Order the submodules of ``model`` as in ``facts``, for ``named_modules``; submodules not in it come
    first."""
    placed: set[str] = set()
    for path in facts:
        parent = model
        names = path.split(".")
        for depth, name in enumerate(names, 1):
            child = parent._modules.get(name)
            if child is None:
                break
            if (prefix := ".".join(names[:depth])) not in placed:
                placed.add(prefix)
                parent._modules[name] = parent._modules.pop(name)
            parent = child


def stand_in_for(standing: nn.Module, view: ModuleView) -> None:
    """Give ``view`` everything that ``standing``, the module it replaces, holds, including hooks."""
    if isinstance(standing, ModuleView):
        HOOKED.discard(standing)
    vars(view).update({key: value for key, value in vars(standing).items() if key not in OWN})
    if has_hooks(view):
        HOOKED.add(view)


#: The modules of torch that change the class of a module, or look up attributes in it.
READ_OWN_CLASS = ("torch.distributed.", "torch.nn.utils.parametrize", "torch._dynamo.")
#: What a view holds of its own.
OWN = ("_view", "_stands_for", "_batch_norm")


def check_kept(parent: nn.Module, name: str, value: Any) -> None:
    """Refuse ``value``, a module, at ``name`` in ``parent`` if a view stands there, or a module with views.

    Raises:
        ModuleAttributeError: the graph would never call it.
    """
    standing = vars(parent).get("_modules", {}).get(name)
    is_view = isinstance(standing, ModuleView) or type(standing) in CONTAINERS
    if is_view and isinstance(value, nn.Module) and value is not standing:
        view = next((module for module in standing.modules() if isinstance(module, ModuleView)), None)
        if view is not None:
            raise ModuleAttributeError.of("TQ970.replaced", path=vars(view)["_view"][1], name=name)


class Container(nn.Module):
    """A plain module on the path of a view; see ``check_kept``."""

    def __setattr__(self, name: str, value: Any) -> None:
        check_kept(self, name, value)
        super().__setattr__(name, value)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        check_kept(self, name, module)
        super().add_module(name, module)

    def _get_name(self) -> str:
        return nn.Module.__name__


#: The classes of modules that only hold others.
CONTAINERS = (nn.Module, Container)


class BiasParameter(nn.Parameter):
    """A bias that can also be called, like ``bias()`` of torch.ao's modules; saved as a plain parameter."""

    def __call__(self) -> Tensor:
        return self


class _StandsFor:
    """Lets ``isinstance`` take a view for a module of the class in ``_stands_for``; ``type`` is its own."""

    def _class(self) -> Any:
        # torch derives a class from what it reads there, and gives the module that class; Dynamo looks up
        # attributes in it and then asks ``type`` for them.
        reads_own = str(sys._getframe(1).f_globals.get("__name__")).startswith(READ_OWN_CLASS)
        return type(self) if reads_own else vars(self).get("_stands_for", type(self))

    def _change_class(self, value: Any) -> None:
        vars(object)["__class__"].__set__(self, value)

    __class__ = property(_class, _change_class)


class ModuleView(_StandsFor, nn.Module):
    """A stand-in for a module of the float model in the converted model."""

    #: The texts of the errors for a call, and for an attribute that it does not have.
    _on_call, _on_attribute = "TQ970.converted_call", "TQ970.converted_attribute"

    def __init__(self, converted: GraphModule, path: str, facts: ModuleFacts) -> None:
        super().__init__()
        vars(self).update(_view=(weakref.ref(converted), path, facts), _batch_norm=None)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            owner, path, facts = vars(self)["_view"]
            if name.startswith("__") or owner() is None:
                raise
        result = self._answer(owner(), path, name)
        if result is MISSING:
            result = facts.settings.get(name, MISSING) if name not in _ANSWERS else MISSING
        if result is MISSING:
            raise ModuleAttributeError.of(self._on_attribute, path=path, kind=facts.kind, name=name)
        return result

    def _answer(self, owner: GraphModule, path: str, name: str) -> Any:
        return _ANSWERS[name](owner, path) if name in _ANSWERS else MISSING

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: the ops of the module are in the graph.

        Raises:
            ModuleAttributeError: always.
        """
        _, path, facts = vars(self)["_view"]
        raise ModuleAttributeError.of(self._on_call, path=path, kind=facts.kind)

    def register_forward_hook(self, hook: Any, **kwargs: Any) -> RemovableHandle:
        """Register a forward hook as ``nn.Module`` does; the graph calls it at the module's ops.

        Raises:
            ModuleAttributeError: the module has no result of its own in the graph.
        """
        self._take(hook)
        return super().register_forward_hook(hook, **kwargs)

    def register_forward_pre_hook(self, hook: Any, **kwargs: Any) -> RemovableHandle:
        """Register a forward pre-hook as ``nn.Module`` does; it may read the inputs, but not change them.

        Raises:
            ModuleAttributeError: the module has no result of its own in the graph.
        """
        self._take(hook)
        return super().register_forward_pre_hook(hook, **kwargs)

    def _take(self, hook: Any) -> None:
        if is_of_fsdp(hook):
            return  # The model itself calls it.
        owner, path, _ = vars(self)["_view"]
        if owner() is not None:
            check_hookable(owner(), path)
        HOOKED.add(self)

    def _get_name(self) -> str:
        return type(self).__name__

    def _refuse_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse a backward hook, which would never be called.

        Raises:
            ModuleAttributeError: always.
        """
        _, path, facts = vars(self)["_view"]
        raise ModuleAttributeError.of("TQ970.backward_hook", path=path, kind=facts.kind)

    register_full_backward_hook = _refuse_hook
    register_full_backward_pre_hook = _refuse_hook
    register_backward_hook = _refuse_hook

    def __copy__(self) -> nn.Module:
        return self

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        # A copy of the model gets its own views.
        names = ("_parameters", "_buffers", "_modules", *(HOOK_STATE if has_hooks(self) else ()))
        return _plain_module, ({name: vars(self)[name] for name in names},)

    def extra_repr(self) -> str:
        owner, path, facts = vars(self)["_view"]
        if owner() is None:
            return ""
        shown = [facts.shown] if facts.shown else []
        scale, zero_point = _output_qparams(owner(), path)
        if scale is not MISSING and type(self).__name__.startswith("Quantized"):
            shown += [f"scale={scale}, zero_point={zero_point}"]
        weight = _weight_node(owner(), path)
        if weight is not None:
            shown += [f"weight={str(attribute_of(owner(), source_of(weight)).dtype).removeprefix('torch.')}"]
            shown += ["per channel" if weight.target is DEQUANTIZE_PER_CHANNEL else "per tensor"]
        return ", ".join(shown)


def hand_over_views(old: nn.Module, new: nn.Module) -> None:
    """Make the views in ``old`` views of ``new``, which has its attributes."""
    for view in new.modules():
        if isinstance(view, ModuleView) and vars(view)["_view"][0]() is old:
            vars(view)["_view"] = (weakref.ref(new), *vars(view)["_view"][1:])


#: The answer for an attribute that a view does not have.
MISSING = object()


def _plain_module(state: dict[str, Any]) -> nn.Module:
    module = nn.Module()
    vars(module).update(state)
    return module


def hooked_views(owner: GraphModule) -> dict[str, nn.Module]:
    """Return path -> view, for the views in ``owner`` that have hooks."""
    matches: dict[str, nn.Module] = {}
    for view in HOOKED:
        of, path, _ = vars(view)["_view"]
        if of() is owner and has_hooks(view):
            matches[path] = view
    return dict(sorted(matches.items()))


@cache
def _view_class(name: str, is_prepared: bool) -> type[ModuleView]:
    return type(name, (PreparedView if is_prepared else ModuleView,), {"__module__": __name__})


def parent_of(model: nn.Module, path: str) -> tuple[nn.Module | None, str]:
    """Return the parent module of ``path`` and the last name of it.

    Missing parents are made; the parent is None if a module on the way is not a plain ``nn.Module``.
    """
    *parents, name = path.split(".")
    module = model
    for parent in parents:
        if parent not in module._modules:
            if parent in vars(module):
                return None, name
            module._modules[parent] = nn.Module()
        child = module._modules[parent]
        if child is None or type(child) not in CONTAINERS:
            return None, name
        module = child
    return module, name


def nodes_by_path(graph_module: GraphModule) -> dict[str, list[Node]]:
    """Return module path -> ops of that module, without q-dq."""
    matches: dict[str, list[Node]] = {}
    for node in graph_module.graph.nodes:
        if node.op == "call_function" and node.target not in (*DEQUANTIZES, QUANTIZE):
            matches.setdefault(module_path_of(node).partition("@")[0], []).append(node)
    return matches


def _nodes_at(model: GraphModule | Mapping[str, list[Node]], path: str) -> list[Node]:
    """Return the ops of the module at ``path``; those of a fused module may be ops of what is in it."""
    nodes = nodes_by_path(model) if isinstance(model, GraphModule) else model
    return nodes.get(path) or [node for index in range(3) for node in nodes.get(f"{path}.{index}", ())]


def _kind_of(facts: ModuleFacts, nodes: list[Node]) -> str:
    """Return the class name of the module in FX's converted model; empty if FX has no such module there."""
    if not nodes:
        return ""
    weight = _weight_of(nodes)
    if weight is None:
        is_fused_away = nodes[0].target in those("relu") and _is_behind_weighted(nodes[0])
        return "" if is_fused_away else facts.kind
    if any(source.target is DEQUANTIZE_DYNAMIC for node in nodes for source in node.all_input_nodes):
        return f"DynamicQuantized{facts.kind}"
    fused = FUSED_RELU.fullmatch(facts.kind)
    if fused is not None and any(user.target in those("relu") for user in nodes[-1].users):
        kind = f"ConvReLU{fused['rank']}" if fused["op"] else "LinearReLU"
        return f"Quantized{kind}"
    return f"Quantized{facts.kind}"


def _converted_class(of_class: type[nn.Module], kind: str) -> type[nn.Module]:
    """Return the class of FX's module that is shown as ``kind``, a class name of ``_kind_of``."""
    for prefix, classes in QUANTIZED_CLASSES.items():
        if kind.startswith(prefix):
            fused: type[nn.Module] = getattr(intrinsic, kind.removeprefix(prefix), of_class)
            of_class = classes.get(fused, of_class)
            break
    return of_class


def _is_behind_weighted(node: Node) -> bool:
    source = node.args[0]
    return isinstance(source, Node) and _weight_of([source]) is not None


def _weight_of(nodes: list[Node]) -> Node | None:
    """Return the dequantize of an integer weight that one of ``nodes`` reads; None if there is none."""
    for node in nodes:
        for source in node.all_input_nodes:
            if source.target in DEQUANTIZES and source_of(source).op == "get_attr":
                return source
    return None


def _weight_node(owner: GraphModule, path: str) -> Node | None:
    return _weight_of(_nodes_at(owner, path))


def _weight(owner: GraphModule, path: str) -> Any:
    """Return a function that returns the quantized weight, like ``weight()`` of torch.ao's modules."""
    node = _weight_node(owner, path)
    if node is None:
        return MISSING

    def weight() -> Tensor:
        values: list[Any] = [attribute_of(owner, arg) if isinstance(arg, Node) else arg for arg in node.args]
        integers, *qparams = values
        if integers.dtype not in LEGACY_DTYPES:
            return Tensor(integers)
        if node.target is DEQUANTIZE_PER_CHANNEL:
            scales, zero_points, axis = qparams[:3]
            result = of_integers_per_channel(integers, scales, zero_points, axis)
        else:
            result = of_integers(integers, *qparams[:2])
        assert isinstance(result, Tensor)
        return result

    return weight


def _bias(owner: GraphModule, path: str) -> Any:
    """Return a function that returns the bias, like ``bias()`` of torch.ao's modules; it includes a folded
    batch norm."""
    weight = _weight_node(owner, path)
    if weight is None:
        return MISSING
    op = next(node for node in _nodes_at(owner, path) if weight in node.all_input_nodes)
    result = op.args[2] if len(op.args) > 2 else op.kwargs.get("bias")

    def bias() -> Any:
        return attribute_of(owner, result) if isinstance(result, Node) else None

    return bias


def _output_qparams(owner: GraphModule, path: str) -> tuple[Any, ...]:
    """Return scale and zero point of the result of the module's op, or of the ReLU after it."""
    nodes = _nodes_at(owner, path)
    node = nodes[-1] if nodes else None
    # ReLU6, pools and dropouts of torch.ao have no scale.
    while node is not None and not _hands_on_qparams(node):
        quantize = next((user for user in node.users if user.target is QUANTIZE), None)
        if quantize is not None:
            return quantize.args[1:3]
        node = next((user for user in node.users if user.target in those("relu")), None)
    return MISSING, MISSING


def _hands_on_qparams(node: Node) -> bool:
    """Return whether the result of ``node`` is quantized with the qparams of its one quantized input."""
    given = [source.args[1:] for source in node.all_input_nodes if source.target in DEQUANTIZES]
    return len(given) == 1 and any(
        user.args[1:] == given[0] for user in node.users if user.target is QUANTIZE
    )


def _scale(owner: GraphModule, path: str) -> Any:
    return _output_qparams(owner, path)[0]


def _zero_point(owner: GraphModule, path: str) -> Any:
    return _output_qparams(owner, path)[1]


def qparam_by_fx_name(reference: GraphModule, name: str) -> Tensor | None:
    """Return the scale or zero point that FX's converted model has by ``name``, or None.

    ``conv_scale_0`` is of the first result of ``conv``, ``conv_input_scale_0`` of the first value that is
    quantized only to be read there.
    """
    counts: Counter[str] = Counter()
    for quantize in reference.graph.find_nodes(op="call_function", target=QUANTIZE):
        source = quantize.args[0]
        while source.op == "call_function" and source.target in those("relu") and _is_behind_weighted(source):
            source = source.args[0]
        readers = [reader for dequantize in quantize.users for reader in dequantize.users]
        places = [f"{_fx_path(reader)}_input" for reader in readers[:1]]
        if source.op == "call_function":
            places.insert(0, _fx_path(source))
        for place in places:
            for kind, value in zip(("scale", "zero_point"), quantize.args[1:3], strict=True):
                if name == f"{place}_{kind}_{counts[place]}":
                    return torch.tensor(value)
        counts.update(places[:1])
    return None


def _fx_path(node: Node) -> str:
    return module_path_of(node).partition("@")[0].replace(".", "_")


_ANSWERS = {"weight": _weight, "bias": _bias, "scale": _scale, "zero_point": _zero_point}


# Views of the float model's modules in a prepared model: ``prepared.conv1.weight_fake_quant``, ``print``.
#
# Legacy: FX's prepared model calls float modules and those of ``torch.ao.nn.qat``. A captured graph only
# reads their parameters: a view holds them at the same path, and has the module's other attributes.


FAKE_QUANTIZE = "weight_fake_quant"
BATCH_NORM = torch.ops.aten.batch_norm.default
#: Methods of torch.ao's fused modules -> whether they freeze.
SWITCHES = {"freeze_bn_stats": True, "update_bn_stats": False}
#: Methods of torch.nn's modules that write parameters and buffers alone.
RESETS = ("reset_parameters", "reset_running_stats")
#: Attribute of a model while its own ``train`` switches all of it.
SWITCHING = "_torchq_compat_switching"
QAT_CLASSES = get_default_qat_module_mappings()


def install_prepared_views(prepared: GraphModule, facts: Mapping[str, ModuleFacts]) -> None:
    """Put a view at every path of ``facts`` that has ops in the graph and no module of its own."""
    with_ops = nodes_by_path(prepared)
    trained = _weight_observers(prepared)
    ops = {
        path: _fused_from(with_ops[path][-1]) if f"{path}.weight" in trained else []
        for path in facts
        if path in with_ops
    }
    classes = {path: _trained_class(facts[path].of_class, found) for path, found in ops.items()}
    kinds = {
        path: (classes[path].__name__ if ops[path] else fact.kind) if path in ops else ""
        for path, fact in facts.items()
    }
    for view in _put_views(prepared, facts, kinds, is_prepared=True):
        path = vars(view)["_view"][1]
        batch_norm = next((module_of(op) for op in ops[path] if op.target is BATCH_NORM), None)
        vars(view).update(_stands_for=classes[path], _batch_norm=batch_norm)


def _fused_from(node: Node) -> list[Node]:
    """Return ``node`` and what FX fuses behind it: operators up to an observer, or to a value read twice."""
    ops = [node]
    while len(ops[-1].users) == 1 and (user := next(iter(ops[-1].users))).op == "call_function":
        ops.append(user)
    return ops


def _trained_class(of_class: type[nn.Module], ops: list[Node]) -> type[nn.Module]:
    """Return the class of FX's module that trains ``of_class`` fused with what is behind it in ``ops``."""
    fused = FUSED_RELU.fullmatch(of_class.__name__)
    if fused is not None and ops:
        targets = {op.target for op in ops}
        behind = "Bn" * (BATCH_NORM in targets) + "ReLU" * (not targets.isdisjoint(those("relu")))
        name = f"{fused['op'] or fused['linear']}{behind}{fused['rank'] or ('1d' if behind == 'Bn' else '')}"
        of_class = getattr(intrinsic, name, of_class)
    return QAT_CLASSES.get(of_class, of_class) if ops else of_class


class PreparedView(ModuleView):
    """A stand-in for a module of the float model in the prepared model, with its parameters."""

    _on_call, _on_attribute = "TQ970.prepared_call", "TQ970.prepared_attribute"

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the module's own ops in the graph, and of the batch norm that FX has inside it."""
        owner, path, _ = vars(self)["_view"]
        super().train(mode and (owner() is None or path not in frozen_modules(owner())))
        if owner() is not None and not vars(owner()).get(SWITCHING):
            set_training(owner(), mode, path)
            if vars(self)["_batch_norm"] is not None:
                self.bn.train(mode)
        return self

    def freeze(self, frozen: bool) -> Self:
        """Do what ``freeze_bn_stats()`` and ``update_bn_stats()`` of torch.ao's fused modules do."""
        owner, batch_norm = vars(self)["_view"][0](), vars(self)["_batch_norm"]
        if owner is not None and batch_norm is not None:
            owner.get_submodule(batch_norm).training = not frozen
            freeze_batch_norm(owner, frozen, batch_norm)
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        """Put a fake-quantize at ``weight_fake_quant`` where the graph calls that of the weight, as FX's QAT
        modules do, and the momentum of a batch norm into the graph."""
        owner, path, _ = vars(self).get("_view", (None, "", None))
        if name == "momentum" and owner is not None and owner() is not None:
            set_momentum(owner(), path, value)
        prepared: Any = None if owner is None or name != FAKE_QUANTIZE else owner()
        target = None if prepared is None else _weight_observer(prepared, path)
        if target is None:
            super().__setattr__(name, value)
        else:
            prepared.set_submodule(target, value)

    def extra_repr(self) -> str:
        return str(vars(self)["_view"][2].shown)

    def _answer(self, owner: GraphModule, path: str, name: str) -> Any:
        if name == FAKE_QUANTIZE:
            return _weight_fake_quantize(owner, path)
        batch_norm = vars(self)["_batch_norm"]
        if name == "bn" and batch_norm is not None:
            return owner.get_submodule(batch_norm)
        if name in SWITCHES and batch_norm is not None:
            return partial(self.freeze, SWITCHES[name])
        is_known = name in RESETS and hasattr(type_of := vars(self)["_stands_for"], name)
        return partial(getattr(type_of, name), self) if is_known else MISSING


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
    return _weight_observers(prepared).get(f"{path}.weight")


def _weight_observers(prepared: GraphModule) -> dict[str, str]:
    """Return path of a weight -> that of its fake-quantize, which reads it, or a product that it begins."""
    kinds = (fake_quantize.FakeQuantizeBase, legacy_fake_quantize.FakeQuantizeBase)
    result: dict[str, str] = {}
    for node, module in called_modules(prepared):
        source = node.args[0] if isinstance(module, kinds) else None
        while isinstance(source, Node) and source.op == "call_function" and source.args:
            source = source.args[0]
        if isinstance(source, Node) and source.op == "get_attr":
            result.setdefault(str(source.target), str(node.target))
    return result
