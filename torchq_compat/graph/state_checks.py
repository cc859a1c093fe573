"""Check a state before it is loaded: ``nn.Module.load_state_dict`` accepts some bad states, and crashes on
others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e.fake_quantize import FakeQuantizeBase
from torchao.quantization.pt2e.observer import ObserverBase

from torchq_compat.errors import CheckpointError
from torchq_compat.qspecs.qdq import NAMESPACE
from torchq_compat.support.argument_checks import shown
from torchq_compat.support.quantized_tensors import is_quantized
from torchq_compat.support.torch_ao import FakeQuantizeBase as LegacyFakeQuantizeBase
from torchq_compat.support.torch_ao import ObserverBase as LegacyObserverBase

__all__ = ["check_state"]


def check_state(state: Any, model: nn.Module) -> None:
    """Refuse anything that is not a state, and values that copying would silently change.

    Raises:
        CheckpointError: ``state`` is not a mapping from names; it has a value that is not a tensor, a meta
            tensor, a tensor whose numbers the dtype of ``model`` cannot hold, a range of an observer that is
            NaN or has ends that differ in number, or a scale that is not positive and finite.
    """
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise CheckpointError.not_a_state(shown(state))
    own, scales, observed = model.state_dict(), set(_scales(model)), set(_observed(model))
    for name, value in state.items():
        expected = own.get(name)
        if not isinstance(value, Tensor):
            if isinstance(expected, Tensor):
                raise CheckpointError.bad_value(name, f"must be a tensor, got {shown(value)}")
            continue
        if value.is_meta:
            raise CheckpointError.bad_value(name, "is a meta tensor, which has no values")
        if isinstance(expected, Tensor) and (value.is_nested or value.layout is not expected.layout):
            raise CheckpointError.bad_value(name, "is sparse or nested, where the model has a dense tensor")
        if is_quantized(value) and name in scales | observed:
            raise CheckpointError.bad_value(name, f"is {value.dtype}, which is no dtype of a range or scale")
        if isinstance(expected, Tensor) and not _can_hold(expected.dtype, value):
            raise CheckpointError.bad_value(name, f"is {value.dtype} where the model has {expected.dtype}")
        if name in observed and bool(value.isnan().any()):
            raise CheckpointError.bad_value(name, "holds NaN")
        other = _other_end(name) if name in observed else None
        highest = state.get(other, own.get(other)) if other is not None else None
        if isinstance(highest, Tensor) and highest.numel() != value.numel():
            counts = f"{value.numel()} numbers, where {other} holds {highest.numel()}"
            raise CheckpointError.bad_value(name, f"holds {counts}")
        if name in scales and not bool((value.isfinite() & (value > 0)).all()):
            raise CheckpointError.bad_value(name, "holds a scale that is no positive number")


def _other_end(name: str) -> str | None:
    """Return the name of the highest value seen, for the name of the lowest; torchao's observers accept any
    number of either."""
    return f"{name.removesuffix('min_val')}max_val" if name.endswith("min_val") else None


def _can_hold(dtype: torch.dtype, value: Tensor) -> bool:
    """Return whether copying ``value`` to ``dtype`` keeps its numbers, up to the rounding of floats."""
    if value.dtype is dtype:
        return True
    if value.dtype is torch.bool or not torch.can_cast(value.dtype, dtype):
        return False
    if is_quantized(value) or value.is_floating_point() or dtype.is_floating_point or dtype.is_complex:
        return True
    # Integers wrap around.
    return bool(torch.equal(value.to(dtype).to(value.dtype), value))


def _observed(model: nn.Module) -> Iterator[str]:
    """Yield the names of what the observers of ``model`` have seen."""
    for path, module in model.named_modules():
        if isinstance(module, (ObserverBase, LegacyObserverBase)):
            for name, value in module.named_buffers(prefix=path, recurse=False):
                if value.is_floating_point():
                    yield name


def _scales(model: nn.Module) -> Iterator[str]:
    """Yield the names of the scales that fake-quantizes and the q-dq operators of ``model`` read."""
    for path, module in model.named_modules():
        if isinstance(module, (FakeQuantizeBase, LegacyFakeQuantizeBase)):
            yield f"{path}.scale"
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            scale = node.args[1] if getattr(node.target, "namespace", "") == NAMESPACE else None
            if isinstance(scale, Node) and scale.op == "get_attr":
                yield f"{path}.{scale.target}".removeprefix(".")
