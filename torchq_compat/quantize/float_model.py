"""What of a float model its copy, a graph, does not keep by itself: training flags, attributes, hooks,
parametrizations, and the optimizer that has its parameters.
"""

import gc
import weakref
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn.utils import parametrize

from torchq_compat.capture.training import batch_counters, has_fixed_mode, set_argument, training_flag
from torchq_compat.codes import said
from torchq_compat.ops import facts
from torchq_compat.read.qconfig_mappings import QConfigRules, select_for_module
from torchq_compat.support import metadata
from torchq_compat.support.decisions import Action, Decision
from torchq_compat.support.graph_nodes import is_inside, module_path_of
from torchq_compat.support.torch_ao import fused_module
from torchq_compat.support.upstream import BatchNormBase, DropoutBase

# The float model's training flags: they do not decide that prepare_fx calibrates and prepare_qat_fx trains.
#
# In FX the flag of an LSTM, not the function called, chose between observers and fake-quantizes. As there,
# dropouts and batch norms keep their flags in prepare_qat_fx, until the script calls train() or eval(), but
# for batch norms fused into a quantized op, which FX makes anew.


TRAINS = (
    "prepare_qat_fx trains every module; batch norms freeze with "
    "prepared.apply(torch.ao.nn.intrinsic.qat.freeze_bn_stats)"
)
WAITS = (
    "as in FX, dropouts and batch norms stay in evaluation until train() is called, but for batch norms "
    "fused into a quantized op: these and the fake-quantizes train"
)
KEPT = (
    "it was set apart in a model in evaluation: it trains in every mode of the prepared and converted model"
)
CALIBRATES = "prepare_fx calibrates in evaluation mode; prepare_qat_fx is for training"


def decide_training_flags(
    model: nn.Module, *, is_qat: bool, fused: Collection[str] = ()
) -> Iterator[Decision]:
    """Yield a decision about each outermost module of ``model``, itself included, whose flag is another than
    that of the function called.

    If ``model`` itself has the right flag, a submodule with the other one was set apart on purpose, so its
    decision is a warning if the flag is not kept.

    Args:
        model: the float model.
        is_qat: whether it is prepared for training.
        fused: paths of batch norms fused into a quantized op.
    """
    kept = set(_trained_on_purpose(model, is_qat=is_qat))
    mode = "evaluation" if is_qat else "training"
    reported: list[str] = []
    for path, module in model.named_modules():
        # torch.fx.symbolic_trace and fuse_modules make containers, whose flags nobody set.
        is_container = type(module) is nn.Module or isinstance(module, fused_module)
        if module.training == is_qat or is_container or any(is_inside(path, outer) for outer in reported):
            continue
        if module in kept:
            yield Decision(
                path, f"training mode of {type(module).__name__}", Action.FLOAT, KEPT, code="TQ313"
            )
            continue
        reported.append(path)
        is_lost = not is_qat or any(is_inside(norm, path) for norm in fused)
        reason = CALIBRATES if not is_qat else (TRAINS if path and is_lost else WAITS)
        kind = f"{mode} mode of {type(module).__name__}"
        yield Decision(path, kind, Action.DROPPED, reason, warn=bool(path) and is_lost, code="TQ313")


def keep_training_flags(prepared: GraphModule, model: nn.Module, fused: Collection[str]) -> None:
    """Give the dropouts and batch norms of ``prepared``, for training, the flags that FX leaves them.

    Args:
        prepared: the prepared model, all of which trains.
        model: the float model.
        fused: paths of batch norms fused into a quantized op.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    evaluates = {path for path, module in modules.items() if not module.training} - set(fused)
    if not evaluates:
        return
    for owner, module in prepared.named_modules():
        if isinstance(module, GraphModule):
            flagged = [node for node in module.graph.nodes if training_flag(node) is not None]
            stays = [n for n in flagged if not has_fixed_mode(n) and _path_in(modules, owner, n) in evaluates]
            counters = [n for n in batch_counters(module) if _path_in(modules, owner, n) in evaluates]
            changed = [set_argument(node, facts(node.target).training, False) for node in stays]
            if any((*changed, *(set_argument(node, 1, 0) for node in counters))):
                module.recompile()
        elif owner in evaluates and isinstance(modules[owner], (DropoutBase, BatchNormBase, nn.RNNBase)):
            module.training = False
    prepared.training = model.training


def _path_in(modules: Mapping[str, nn.Module], owner: str, node: Node) -> str:
    """Return the path in the float model of the module behind ``node`` of the graph at ``owner``."""
    own = module_path_of(node).partition("@")[0]
    return next((path for path in (f"{owner}.{own}".strip("."), own) if path in modules), "")


def set_training_flags(working: nn.Module, *, is_qat: bool) -> None:
    """Put ``working``, the package's own copy, into the mode it is captured in.

    A dropout or batch norm in training in a model in evaluation, such as Monte Carlo dropout, was set on
    purpose, and keeps its flag.
    """
    kept = _trained_on_purpose(working, is_qat=is_qat)
    working.train(is_qat)
    for module in kept:
        module.training = True


def _trained_on_purpose(model: nn.Module, *, is_qat: bool) -> list[nn.Module]:
    if is_qat or model.training:
        return []
    return [m for m in model.modules() if m.training and isinstance(m, (DropoutBase, BatchNormBase))]


# Decisions about Python attributes and hooks of a model, which do not survive capture.


MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def decide_leftovers(model: nn.Module, preserved: Collection[str]) -> Iterator[Decision]:
    """Yield decisions about the attributes of ``model`` itself and the hooks of all its modules.

    Args:
        model: the float model.
        preserved: the names of attributes that the user's configuration keeps.
    """
    for name, value in vars(model).items():
        known = name in MODULE_ATTRIBUTES or name in preserved or name.startswith("_")
        if known or isinstance(value, Tensor):
            continue
        yield Decision(
            name,
            "attribute",
            Action.DROPPED,
            "torch.export keeps no Python attributes; PrepareCustomConfig.set_preserved_attributes does",
            code="TQ311",
        )
    for path, module in model.named_modules():
        if hooks := [hook for kind in HOOKS for hook in (getattr(module, kind, None) or {}).values()]:
            yield Decision(
                path,
                f"hooks of {type(module).__name__}",
                Action.DROPPED,
                said("TQ311"),
                # Those of weight_norm, spectral_norm and prune compute a weight, and nobody set them by hand.
                warn=not all(hook.__module__.startswith("torch.nn.utils.") for hook in hooks),
                code="TQ311",
            )


# Modules whose weight a parametrization computes, such as ``weight_norm``.
#
# After training the weight is a constant: it is computed once and the module becomes a plain one, so that
# its weight is quantized and its batch norm folded. FX does so only with a module that is fused with a
# ReLU; of the others it quantizes the activations. In QAT the weight changes with every step, and the
# module stays float.


WEIGHTED = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.Linear, nn.Embedding, nn.EmbeddingBag),
)


def compute_weights(working: nn.Module, rules: QConfigRules) -> None:
    """Make each module of ``working`` whose parametrized weight is to be quantized a plain one, with the
    weight as it is computed now.

    Args:
        working: the package's own copy of the model, in evaluation mode.
        rules: the rules that say what is to be quantized.
    """
    for _, module, plain in _to_quantize(working, rules):
        _make_plain(module, plain)


def decide_parametrizations(model: nn.Module, rules: QConfigRules, *, is_qat: bool) -> Iterator[Decision]:
    """Yield a decision about each module of ``model`` whose parametrized weight is to be quantized."""
    for path, _, plain in _to_quantize(model, rules):
        if is_qat:
            where = f'model.get_submodule("{path}")' if path else "model"
            call = f'torch.nn.utils.parametrize.remove_parametrizations({where}, "weight")'
            reason = said("TQ403", call=call)
            yield Decision(path, plain.__name__, Action.FLOAT, reason, warn=True, code="TQ403")
        else:
            yield Decision(
                path, f"parametrization of {plain.__name__}", Action.DROPPED, said("TQ331"), code="TQ331"
            )


def _to_quantize(model: nn.Module, rules: QConfigRules) -> list[tuple[str, nn.Module, type[nn.Module]]]:
    """Return path, module and the class that the module had before it was parametrized."""
    matches: list[tuple[str, nn.Module, type[nn.Module]]] = []
    for path, module in model.named_modules():
        if not isinstance(module, WEIGHTED) or not parametrize.is_parametrized(module, "weight"):
            continue
        plain = type(module).__mro__[1]
        if select_for_module(rules, plain, path).qconfig is not None:
            matches.append((path, module, plain))
    return matches


def _make_plain(module: nn.Module, plain: type[nn.Module]) -> None:
    """Replace the parametrized tensors of ``module`` by parameters with their values.

    ``remove_parametrizations`` would take the tensors from the class, which copies of a module share, and
    write the values into what they are computed from, which may be another module's parameter as well.
    """
    with torch.no_grad():
        values = {name: getattr(module, name).detach().clone() for name in module.parametrizations}  # type: ignore[union-attr]
    del module.parametrizations
    module.__class__ = plain
    for name, value in values.items():
        module.register_parameter(name, nn.Parameter(value))


# An optimizer made before prepare_qat_fx has the float model's parameters, which FX's prepared model shares.


#: Of each parameter, so many values are remembered.
FIRST_VALUES = 64


def remember_parameters(prepared: GraphModule, model: nn.Module) -> None:
    """Write the parameters of ``prepared``, their first values and those of ``model`` to its meta."""
    parameters = (parameter for parameter in prepared.parameters() if not parameter.is_meta)
    values = tuple((weakref.ref(p), _head(p)) for p in parameters)
    metadata.UNTRAINED.write(prepared, (values, tuple(map(weakref.ref, model.parameters()))))


def are_never_updated(prepared: GraphModule) -> bool:
    """Return whether parameters of ``prepared`` have gradients, and none of them changed since prepare,
    while there is an optimizer of the float model's."""
    own = {id(parameter) for parameter in prepared.parameters() if not parameter.is_meta}
    values, of_model = metadata.UNTRAINED.of(prepared) or ((), ())
    now = [(p, head) for ref, head in values if (p := ref()) is not None and id(p) in own]
    if all(p.grad is None for p, _ in now if p.is_leaf):
        return False
    if not all(torch.equal(_head(p), head) for p, head in now):
        return False
    ids = {id(ref()) for ref in of_model if ref() is not None}
    optimizers: Any = (o for o in gc.get_objects() if issubclass(type(o), torch.optim.Optimizer))
    return any(id(p) in ids for o in optimizers for group in o.param_groups for p in group["params"])


def _head(parameter: nn.Parameter) -> torch.Tensor:
    return parameter.detach().reshape(-1)[:FIRST_VALUES].cpu().clone()
