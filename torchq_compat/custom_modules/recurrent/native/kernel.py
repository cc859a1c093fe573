"""The compiled cell loop: built once for a machine with its C++ compiler, then called through ctypes."""

from __future__ import annotations

import ctypes
import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from torchq_compat.custom_modules.recurrent.native.program import INSTRUCTION_COLUMNS, SLOT_COLUMNS
from torchq_compat.user_warnings import warn_user

__all__ = ["KernelBuild", "kernel_build", "run_kernel"]

SOURCE = Path(__file__).with_name("cell_loop.cpp")
# No contraction: a fused multiply-add would round otherwise than the q-dq graph.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off")
WIDE_VECTORS = "-mprefer-vector-width=512"
#: Multiply-adds of a step from which more threads pay for meeting at a barrier.
WORK_PER_THREAD = 1 << 18


class KernelBuild:
    """What came of building the kernel.

    Attributes:
        library: None without a kernel.
        problem: why there is none.
    """

    def __init__(self, library: ctypes.CDLL | None, problem: str | None = None) -> None:
        self.library = library
        self.problem = problem


@functools.cache
def kernel_build() -> KernelBuild:
    """Build the kernel, or load what an earlier process built in ``TORCH_EXTENSIONS_DIR``.

    Without a C++ compiler warns once that recurrent modules run on torch's own operators.
    """
    try:
        return KernelBuild(_load())
    except (RuntimeError, OSError, ImportError) as cause:
        problem = str(cause).strip().splitlines()[0] if str(cause).strip() else type(cause).__name__
        warn_user(
            "Recurrent modules run step by step on torch's operators, with the same numbers but slowly: the "
            f"native kernel could not be built ({problem}). Hint: install a C++ compiler, such as g++; "
            "a kernel built elsewhere for the same CPU is found through TORCH_EXTENSIONS_DIR."
        )
        return KernelBuild(None, problem)


def _load() -> ctypes.CDLL:
    from torch.utils.cpp_extension import load

    capabilities = torch.cpu.get_capabilities()
    flags = [*FLAGS, *([WIDE_VECTORS] if capabilities.get("avx512_f") else [])]
    # A directory of built extensions may be shared by machines with different instructions.
    built_for = hashlib.sha256(repr(sorted(capabilities.items())).encode()).hexdigest()[:8]
    path = load(
        f"torchq_compat_cell_loop_{built_for}",
        [str(SOURCE)],
        extra_cflags=[*flags, "-fopenmp"],
        extra_ldflags=["-fopenmp"],
        is_python_module=False,
    )
    return ctypes.CDLL(path)


def run_kernel(
    library: ctypes.CDLL,
    x: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor | None],
    table: Tensor,
    constants: Tensor,
    input_grids: Sequence[float],
    backward: bool,
) -> tuple[Tensor, list[Tensor]]:
    """One direction of a layer; arguments and results as the operator has them, contiguous."""
    steps, batch, _ = x.shape
    states = [state.contiguous() for state in states]
    x, output = x.contiguous(), x.new_empty(steps, batch, states[0].shape[-1])
    last = [torch.empty_like(state) for state in states]
    instruction_count, slot_count, state_count = table[:3].tolist()
    instructions = table[3:]
    slots = instructions[INSTRUCTION_COLUMNS * instruction_count :]
    results = slots[SLOT_COLUMNS * slot_count :]
    held = [None if each is None else each.contiguous() for each in weights]
    sizes, work = [], 0
    for values in held[0::4]:
        assert values is not None
        sizes.append(values.shape[1])
        work += values.numel() * batch
    library.torchq_compat_run_cell(
        _address(instructions.data_ptr()),
        _address(constants.data_ptr()),
        _count(instruction_count),
        _address(slots.data_ptr()),
        _count(slot_count),
        _address(results.data_ptr()),
        _count(state_count),
        _pointers(held),
        (ctypes.c_int64 * len(sizes))(*sizes),
        _count(len(held) // 4),
        (ctypes.c_double * len(input_grids))(*input_grids),
        _count(len(input_grids) // 5),
        _count(steps),
        _count(batch),
        _count(int(backward)),
        _address(x.data_ptr()),
        _pointers(states),
        _address(output.data_ptr()),
        _pointers(last),
        _count(min(torch.get_num_threads(), max(1, work // WORK_PER_THREAD))),
    )
    return output, last


def _pointers(tensors: Sequence[Tensor | None]) -> ctypes.Array[ctypes.c_void_p]:
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    return (ctypes.c_void_p * len(addresses))(*addresses)


_address = ctypes.c_void_p
_count = ctypes.c_int64
