"""Names for the flat tensors of a call (``x``, ``batch.mask``) and of a result (``0``, ``logits``)."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from torchq_compat.opaque_calls.layouts import Structure

__all__ = ["input_labels", "most_specific", "output_labels"]


def input_labels(owner: type[nn.Module], inputs: Structure) -> list[str]:
    """Return a label for each tensor of ``(args, kwargs)``: the parameter of ``owner.forward``, then the keys
    inside it."""
    names = _positional_names(owner)
    labels = []
    for place, first, *rest in inputs.tensor_keys():
        name = names[first] if place == 0 and first < len(names) else str(first)
        labels.append(".".join([name, *map(str, rest)]))
    return labels


def output_labels(outputs: Structure) -> list[str]:
    """Return a label for each tensor of a result, the keys that lead to it; empty for a single tensor."""
    return [".".join(map(str, keys)) for keys in outputs.tensor_keys()]


def most_specific(settings: dict[str, Any], label: str) -> str | None:
    """Return the longest key of ``settings`` that is ``label`` or a prefix of its path, or None."""
    matching = [key for key in settings if label == key or label.startswith(f"{key}.")]
    return max(matching, key=len, default=None)


def _positional_names(owner: type[nn.Module]) -> list[str]:
    if issubclass(owner, torch.jit.ScriptModule):
        return []  # Only its instances have a forward.
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(owner.forward).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind in kinds][1:]
