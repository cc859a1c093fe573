"""Decisions about Python attributes and hooks of a model, which do not survive capture."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import Tensor, nn

from torchq_compat.support.decisions import Action, Decision

__all__ = ["decide_leftovers"]

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
        )
    for path, module in model.named_modules():
        if any(getattr(module, kind, None) for kind in HOOKS):
            yield Decision(
                path,
                f"hooks of {type(module).__name__}",
                Action.DROPPED,
                "hooks run once, while the model is captured: what they compute on tensors is in the graph, "
                "their other effects are lost",
                warn=True,
            )
