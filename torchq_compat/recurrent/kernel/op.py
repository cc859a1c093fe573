"""A converted recurrent module as one torch operator, ``torchq_compat_native::recurrent``.

On the CPU it runs in C++ (``recurrent_operator.cpp``), which is built at the first call. If that fails, and
on other devices, torch's operators run the same program.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from torchq_compat.read.qdq import are_large_read_one_by_one
from torchq_compat.recurrent.kernel.build import OF_LIBRARY, kernel_build
from torchq_compat.recurrent.kernel.interpreter import run_by_operators
from torchq_compat.recurrent.kernel.program import last_result_dtype
from torchq_compat.support.process_state import is_compiling, once

NAMESPACE = "torchq_compat_native"
SCHEMA = (
    "(Tensor x, Tensor[] states, Tensor[] weights, Tensor program, float[] boundary, int[] batch_sizes, "
    "int directions, bool batch_first, int owner=0, int version=-1, int work_per_thread=262144) -> Tensor[]"
)
#: Multiply-adds per step for which one more thread is worth the wait at a barrier.
WORK_PER_THREAD = 1 << 18
OPS = getattr(torch.ops, NAMESPACE)
#: Stands for an owner: the operator packs one weight after the other, for this call alone.
OWNER_OF_ONE_CALL = -1
#: What is no longer needed: the operator that drops it, and the number of an owner of weights, or of a chain.
FORGOTTEN: deque[tuple[str, int]] = deque()
#: The ``batch_sizes`` of an unpacked call in an exported program: AOTInductor cannot pass an empty list.
NO_SIZES = (0,)


_IMPLEMENTED = torch.library.Library(NAMESPACE, "IMPL")  # type: ignore[no-untyped-call]


@once  # Of a second time torch warns the user.
def kernel_operator(name: str) -> Any:
    """Return an operator that is defined, here or by the library once that is loaded."""
    operator = getattr(OPS, name).default
    # Integers have no gradients; without this every result would require grad, because biases are parameters.
    _IMPLEMENTED.impl(name, torch.library.fallthrough_kernel, "Autograd")  # type: ignore[no-untyped-call]
    return operator


def define_operator(
    name: str, schema: str, by_operators: Callable[..., Any], shapes: Callable[..., Any]
) -> Any:
    """Define an operator that runs ``by_operators``, on the CPU C++ as soon as it is built; return it."""

    def before_the_kernel(*call: Any) -> Any:
        is_first = call[0].device.type == "cpu" and not hasattr(OPS, OF_LIBRARY)
        run = getattr(OPS, name).default if is_first and kernel_build().is_loaded else by_operators
        return run(*call)

    # torch already has the operator after an import that failed half-way, or if a program without Python has
    # loaded the library before.
    if not hasattr(OPS, name):
        torch.library.define(f"{NAMESPACE}::{name}", schema)
    torch.library.impl(f"{NAMESPACE}::{name}", "default")(before_the_kernel)
    torch.library.register_fake(f"{NAMESPACE}::{name}")(shapes)
    return kernel_operator(name)


def _by_operators(*call: Any) -> list[Tensor]:
    x, states, weights, program, boundary, batch_sizes, _, batch_first = call[:8]
    sizes = _sizes(batch_sizes)
    return run_by_operators(x, states, weights, program, boundary, sizes, batch_first=batch_first)


def _sizes(batch_sizes: Sequence[int]) -> Sequence[int]:
    return () if tuple(batch_sizes) == NO_SIZES else batch_sizes


def _shapes(
    x: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    program: Tensor,
    boundary: Sequence[float],
    batch_sizes: Sequence[int],
    directions: int,
    batch_first: bool,
    owner: int = 0,
    version: int = -1,
    work_per_thread: int = 0,
) -> list[Tensor]:
    """Return results of the right shapes; recurrent modules are captured with states, linears have none."""
    if not states:
        return [x.new_empty(x.shape[0], weights[0].shape[0], dtype=last_result_dtype(boundary))]
    last = [torch.empty_like(state) for state in states]
    if x.dim() == 2 and not _sizes(batch_sizes):
        return last
    width = directions * states[0].shape[-1]
    if not batch_first or x.dim() == 2:
        return [x.new_empty(*x.shape[:-1], width), *last]
    batch, steps, _ = x.shape
    return [x.new_empty(steps, batch, width).transpose(0, 1), *last]  # the kernel's layout, transposed


RECURRENT = define_operator("recurrent", SCHEMA, _by_operators, _shapes)


def recurrent(
    x: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    program: Tensor,
    boundary: Sequence[float],
    *,
    batch_sizes: Sequence[int] = (),
    directions: int = 1,
    batch_first: bool = False,
    owner: int = 0,
) -> list[Tensor]:
    """Run all layers and directions of a converted recurrent module, or one step of a cell.

    Args:
        x: (T, B, I), or (B, T, I) with ``batch_first``; (B, I) for one step of a cell; with ``batch_sizes``
            packed rows. float32, or 8-bit integers with the qparams in ``boundary``.
        states: (layers * directions, B, width) each, the hidden state first; (B, width) for a cell. float32,
            or integers like ``x``. Empty: zeros.
        weights: for each linear the int8 values (N, K), then its scales (N,), zero points (N,) and bias (N,),
            those of them that it has according to ``program``.
        program: ``ModuleNumbers.tensor()``.
        boundary: ``Boundary.numbers()``.
        batch_sizes: the number of rows of each step of packed sequences, which never grows; empty or
            ``NO_SIZES``: x is not packed.
        directions: the number of directions of each layer.
        owner: the owner of the packed weights; 0: no owner, and only the last few packed weights are kept;
            ``OWNER_OF_ONE_CALL`` in place of any other where memory is saved.

    Returns:
        The output (T, B, directions * width), in the order of ``x``, and the last states; for a cell only the
        last states. float32, or integers if ``boundary`` has qparams for the result.

    Raises:
        RuntimeError: if the arguments do not fit the program.
    """
    if are_large_read_one_by_one(weights):
        owner = OWNER_OF_ONE_CALL
    # Version -1: the operator looks at the weights, which may have been written in place.
    around = (batch_sizes, directions, batch_first, owner, -1, WORK_PER_THREAD)
    results: list[Tensor] = RECURRENT(x, states, weights, program, boundary, *around)
    return results


@once
def bound_operator() -> Callable[..., list[Tensor]]:
    """Return ``recurrent`` for repeated calls, with x, the states, the number from ``bind_call``, whether x
    and the output are (B, T, ...), and work_per_thread as arguments. Available if the kernel is loaded.

    The function is the one the operator's overload calls after it has inspected every argument in Python.
    """
    operator: Callable[..., list[Tensor]] = kernel_operator("recurrent_bound")._op
    return operator


def bind_call(
    weights: Sequence[Tensor], program: Tensor, boundary: Sequence[float], owner: int, version: int
) -> int:
    """Bind the arguments of ``recurrent`` other than x and the states, for ``bound_operator``; ``version``
    grows whenever a weight is written in place.

    Returns:
        A number for the bound arguments, valid until the owner binds other weights, or another version of
        them, or is forgotten.

    Raises:
        RuntimeError: if the weights or the boundary do not fit the program.
    """
    ticket: int = OPS.bind_call.default(weights, program, boundary, owner, version)
    return ticket


def forget(number: int, operator: str = "forget") -> None:
    """Mark the packed weights of an owner, or what another ``operator`` drops, to be dropped when the next
    module is bound.

    They are not dropped at once: garbage may be collected while a graph is traced, which would record the
    call.
    """
    FORGOTTEN.append((operator, number))


def drop_forgotten() -> None:
    """Drop what ``forget`` marked."""
    if FORGOTTEN and not is_compiling() and kernel_build().is_loaded:
        with suppress(IndexError):  # Another thread may take the last.
            while True:
                operator, number = FORGOTTEN.popleft()
                getattr(OPS, operator).default(number)
