"""Private names of torch and torchao that this package relies on; they are imported here and nowhere else.

``tests/support/test_upstream.py`` tests what is relied on of each name: a release that changes one fails
there first.
"""

import builtins
import importlib
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
import torchao.utils
from torch import nn
from torch._guards import TracingContext, detect_fake_mode
from torch._higher_order_ops.scan import scan
from torch._ops import OpOverload, OpOverloadPacket
from torch._ops import _ModeStackStateForPreDispatch as ModeStack
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule
from torch.fx._lazy_graph_module import _use_lazy_graph_module as lazy_graph_modules
from torch.fx._symbolic_trace import _Patcher as Patcher
from torch.fx._symbolic_trace import _wrapped_fns_to_patch as WRAPPED_FUNCTIONS
from torch.fx.graph import _format_target as format_target
from torch.fx.graph import _PyTreeCodeGen as PyTreeCodeGen
from torch.fx.graph_module import _USER_PRESERVED_ATTRIBUTES_KEY as USER_PRESERVED_ATTRIBUTES_KEY
from torch.fx.graph_module import _forward_from_src as forward_from_src
from torch.fx.graph_module import _loader as graph_sources
from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
from torch.nn.modules.dropout import _DropoutNd as DropoutBase
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from torch.utils._sympy.numbers import int_oo
from torchao.quantization.pt2e.observer import _is_activation_post_process as is_activation_post_process
from torchao.quantization.pt2e.utils import _get_node_name_to_scope as get_node_name_to_scope

from torchq_compat.support.torch_ao import FIXED_QPARAMS_OP_TO_OBSERVER, fx_utils

#: Functions that make a quantized tensor from integers and qparams; None in a torch without such tensors.
make_per_tensor_quantized_tensor: Any = getattr(torch, "_make_per_tensor_quantized_tensor", None)
make_per_channel_quantized_tensor: Any = getattr(torch, "_make_per_channel_quantized_tensor", None)
#: The operators behind the packing functions of torch.nn.utils.rnn, and the gradient of the first.
pack_padded_sequence: Any = torch._VF._pack_padded_sequence
pack_padded_sequence_backward: Any = torch.ops.aten._pack_padded_sequence_backward
pad_packed: Any = torch._VF._pad_packed_sequence
#: A clone that shares its storage until one of both is written to; whether a tensor shares; its address, for
#: reading alone; how many objects hold a storage, and a tensor.
lazy_clone: Any = torch._lazy_clone
is_shared: Any = torch._C._is_cow_tensor  # type: ignore[attr-defined]
data_address: Any = torch._C._data_address  # type: ignore[attr-defined]
storage_uses: Any = torch._C._storage_Use_Count
tensor_uses: Any = torch.Tensor._use_count  # type: ignore[attr-defined]
#: What an overload of an operator calls, which takes less time than the overload.
overload_caller: Any = attrgetter("_op")
#: Whether hooks of all modules are to be called.
has_global_hooks: Callable[[], bool] = torch.nn.modules.module._has_any_global_hook
#: Tells torch.export a condition on data-dependent sizes.
assume: Any = torch._check
#: Its ``backed_size_oblivious`` keeps sizes of 1 free.
symbolic_shapes_config: Any = importlib.import_module("torch.fx.experimental._config")
#: Modules and names of cached functions that keep the models they were called with alive.
DEVICE_CACHES = (
    (torchao.utils, "_assert_and_get_unique_device"),
    *([(fx_utils, "assert_and_get_unique_device")] if fx_utils else []),
)
#: The modes that see calls of torch's functions, the innermost last.
function_modes: Any = torch.overrides._get_current_function_mode_stack
#: The tracer of FX, which torch.export traces with.
fx_tracing: Any = importlib.import_module("torch.fx._symbolic_trace")
#: (owner, attribute) of the class whose instances replace methods of ``nn.Module`` in a trace, and of the
#: stack of modes before dispatch.
PATCHER, MODE_STACK = (fx_tracing, "_Patcher"), (torch._ops, "_mode_stack_state_for_pre_dispatch")
#: (owner, attribute) of what a trace sets for all threads, and sets back.
SET_FOR_ALL_THREADS: tuple[tuple[Any, str], ...] = (
    *((torch.compiler, name) for name in ("_is_compiling_flag", "_is_exporting_flag")),
    *((fx_tracing, name) for name in ("_is_fx_tracing_flag", "CURRENT_PATCHER")),
    *(PATCHER, MODE_STACK),
    *((nn.Module, "__call__"), (nn.Module, "__getattr__")),
    *((builtins, "max"), (builtins, "min"), (math, "pow"), (sys, "stderr")),
    *((torch.backends.mkldnn, "enabled"), (torch.backends.cudnn, "enabled")),
    (torch.fx.config, "do_not_emit_stack_traces"),
)


def guards_of(program: ExportedProgram) -> list[str]:
    """Return the guards that ``program.module()`` checks, as Python code; removing one from the list removes
    it from the program."""
    guards: list[str] = getattr(program, "_guards_code", [])  # not in every torch
    return guards


@contextmanager
def tracing_paused() -> Iterator[None]:
    """Hide the operations inside the ``with`` block from torch.jit.trace, if it is tracing."""
    state = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch._C._set_tracing_state(state)  # type: ignore[attr-defined]


def are_operators_watched() -> bool:
    """Return whether a profiler, or a mode of torch, is to see each operator that runs."""
    return bool(
        torch.autograd.profiler._is_profiler_enabled
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
    )


def default_store() -> Any:
    """Return the store of the default process group, which must be there."""
    return dist.distributed_c10d._get_default_store()


def is_free(size: torch.SymInt) -> bool:
    """Return whether ``size`` is a symbol of a value, nothing computed from it, and has no greatest value."""
    return bool(size.node.expr.is_Symbol) and limits_of(size)[1] is None


def limits_of(size: torch.SymInt) -> tuple[Any, Any]:
    """Return the least and the greatest value that torch.export assumes of ``size``; None if no greatest."""
    bounds = size.node.shape_env.bound_sympy(size.node.expr)
    return bounds.lower, None if bounds.upper == int_oo else bounds.upper
