"""Finds the shapes of a module's results if fake tensors fail: the module branches on data, or leaves torch.

The module is run twice on real tensors, the second time with other sizes. A size of a result is taken to be
the size of an input that it equals both times, or else a constant.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchq_compat.errors import UserModuleError
from torchq_compat.opaque_calls.layouts import Structure
from torchq_compat.support.model_copies import copied_model
from torchq_compat.support.upstream import disable_current_modes

__all__ = ["probe"]


def probe(module: nn.Module, path: str, args: Any, kwargs: Any) -> Any:
    """Return empty tensors of the shapes and dtypes of ``module(*args, **kwargs)``, in the same structure.

    Raises:
        UserModuleError: if the module fails on example data, or its shapes depend on the data.
    """
    inputs, tensors, sizes = Structure.take_apart_with_sizes((args, kwargs))
    runs = [_Run.of(module, path, inputs, tensors, sizes, other=other) for other in (False, True)]
    first, second = runs
    if first.outputs != second.outputs:
        raise _shapes_depend_on_data(path, type(module))
    known: list[Any] = [size for tensor in tensors for size in tensor.shape if isinstance(size, torch.SymInt)]
    known += [size for size in sizes if isinstance(size, torch.SymInt)]
    results = []
    for one, other in zip(first.results, second.results, strict=True):
        if one.dim() != other.dim() or one.dtype != other.dtype:
            raise _shapes_depend_on_data(path, type(module))
        pairs = zip(one.shape, other.shape, strict=True)
        shape = [_size(pair, known, path, type(module)) for pair in pairs]
        results.append(tensors[0].new_empty(shape, dtype=one.dtype))
    return first.outputs.put_together(results)


@dataclass
class _Run:
    outputs: Structure
    results: list[Tensor]

    @classmethod
    def of(
        cls, module: nn.Module, path: str, inputs: Structure, tensors: Any, sizes: Any, *, other: bool
    ) -> _Run:
        value = _other if other else _hint
        fill: Callable[..., Tensor] = torch.ones if other else torch.zeros
        # Inside torch.export every new tensor would be fake.
        with disable_current_modes():
            return cls._really(module, path, inputs, tensors, sizes, value, fill)

    @classmethod
    def _really(
        cls, module: nn.Module, path: str, inputs: Structure, tensors: Any, sizes: Any, value: Any, fill: Any
    ) -> _Run:
        real = [fill([value(size) for size in t.shape], dtype=t.dtype, device=t.device) for t in tensors]
        args, kwargs = inputs.put_together(real, [value(size) for size in sizes])
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                return cls(*Structure.take_apart(copied_model(module)(*args, **kwargs)))
        except Exception as cause:
            raise _shapes_unknown(path, type(module), cause) from cause


def _hint(size: Any) -> int:
    return size.node.hint if isinstance(size, torch.SymInt) else int(size)


def _other(size: Any) -> int:
    """Return another value of ``size`` than its hint; a symbol has the same value in all sizes."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    expression = size.node.expr
    symbols = sorted(expression.free_symbols, key=str)
    hints = size.node.shape_env.backed_var_to_val
    moved = {symbol: 2 * hints[symbol] + 1 + index for index, symbol in enumerate(symbols)}
    return int(expression.xreplace(moved))


def _size(pair: tuple[int, int], known: list[Any], path: str, owner: type) -> Any:
    for size in known:
        if (_hint(size), _other(size)) == pair:
            return size
    if pair[0] != pair[1]:
        raise _shapes_depend_on_data(path, owner)
    return pair[0]


def _shapes_unknown(path: str, found: type, cause: BaseException) -> UserModuleError:
    first_line = str(cause).strip().split("\n", 1)[0]
    return UserModuleError(
        f"the shapes of the results of {found.__name__} at {path!r} cannot be computed without data: "
        f"{type(cause).__name__}: {first_line}",
        hint="register a torchq_compat.custom_modules.UserModuleHandler whose fake_call computes them.",
    )


def _shapes_depend_on_data(path: str, found: type) -> UserModuleError:
    return UserModuleError(
        f"the shapes of the results of {found.__name__} at {path!r} are no sizes of its inputs.",
        hint="register a torchq_compat.custom_modules.UserModuleHandler whose fake_call computes them.",
    )
