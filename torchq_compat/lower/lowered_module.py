"""What ``convert_fx`` returns on x86: a graph of integer kernels around the reference graph it came from.

Legacy: the GraphModule of ``convert_fx``, with modules of ``torch.ao.nn.quantized`` and packed weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from types import SimpleNamespace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.fx import Graph
from torch.fx.graph import PythonCode

from torchq_compat.decisions import Decision
from torchq_compat.graph_module import ConvertedGraphModule, QuantizationGraphModule, preserved_of
from torchq_compat.lower.emit import emit
from torchq_compat.lower.engines import Engine, packing_for
from torchq_compat.lower.leaves import lower_leaves
from torchq_compat.lower.part import MADE, share_state
from torchq_compat.lower.plan import plan_graph
from torchq_compat.quantized_interface import take_integers
from torchq_compat.specs.grids import Grid

__all__ = ["LoweredGraphModule", "lower"]

#: Attribute that holds the ``_Lowering`` of a lowered model.
LOWERING = "_torchq_compat_lowering"


@dataclass
class _Lowering:
    """What was made from ``reference``.

    Attributes:
        is_stale: whether the state changed since.
        input_grids: see ``ConvertedGraphModule``.
    """

    reference: ConvertedGraphModule
    engine: Engine
    is_stale: bool = True
    decisions: tuple[Decision, ...] = ()
    input_grids: tuple[Grid | None, ...] = field(default=())


def lower(reference: ConvertedGraphModule, engine: Engine) -> LoweredGraphModule:
    """``reference`` on the integer kernels of ``engine``; the result holds ``reference``."""
    lowered = LoweredGraphModule(nn.Module(), Graph())
    share_state(lowered, reference)
    lowered.meta = reference.meta
    vars(lowered)[LOWERING] = _Lowering(reference, engine)
    for name, value in preserved_of(reference).items():
        setattr(lowered, name, value)
    lowered.training = reference.training
    lowered._lower_again()
    return lowered


class LoweredGraphModule(QuantizationGraphModule):
    """A converted model that runs on integer kernels.

    The reference graph is the one source of truth: parameters, buffers, submodules and state_dict are its
    own, and the kernels' packed weights are made from them, again whenever a state was loaded or moved.
    ``graph`` and ``code`` are what runs. torch.compile, torch.export and torch.jit.trace see the reference
    graph, which is portable.
    """

    @property
    def reference(self) -> ConvertedGraphModule:
        """The q-dq graph of ``convert_to_reference_fx``; it shares its state with this model."""
        return self._lowering.reference

    @property
    def lowering(self) -> tuple[Decision, ...]:
        """What runs on which kernel, what does not, and why."""
        return self._lowering.decisions

    @property
    def _lowering(self) -> _Lowering:
        lowering: _Lowering = vars(self)[LOWERING]
        return lowering

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        lowering = self._lowering
        if _is_captured():
            return lowering.reference(*args, **kwargs)
        if lowering.is_stale:
            self._lower_again()
        if self.record.interface.inputs:
            bound = self.record.signature.bind(args, kwargs)
            return super().__call__(*take_integers(bound, lowering.input_grids))
        return super().__call__(*args, **kwargs)

    def _lower_again(self) -> None:
        """Make the graph and the packed weights from the reference graph as it is now."""
        lowering, state = self._lowering, vars(self)
        with packing_for(lowering.engine), torch.no_grad():
            plan = plan_graph(lowering.reference)
            leaves = lower_leaves(lowering.reference, lambda inside: _lower_inside(inside, lowering.engine))
            paths = {leaf.path: f"{MADE}.{leaf.name}" for leaf in leaves if leaf.module is not None}
            in_floats = {
                leaf.path for leaf in leaves if leaf.module is not None and leaf.module.leaf_in_floats
            }
            lowered = emit(lowering.reference, plan, paths, in_floats, MADE)
        modules = {leaf.name: leaf.module for leaf in leaves if leaf.module is not None}
        state[MADE] = SimpleNamespace(**lowered.constants, **modules)
        state[LOWERING] = _Lowering(
            lowering.reference,
            lowering.engine,
            is_stale=False,
            decisions=(*plan.decisions, *(decision for leaf in leaves for decision in leaf.decisions)),
            input_grids=lowering.reference.input_grids(),
        )
        self.graph = lowered.graph

    @property
    def graph(self) -> Graph:
        """The graph that runs; for torch.export, which interprets it, that of the reference."""
        return self.reference.graph if _is_captured() else self._graph

    @graph.setter
    def graph(self, graph: Graph) -> None:
        self._graph = graph
        graph.owning_module = self
        self.recompile()

    def recompile(self) -> PythonCode:
        """See ``torch.fx.GraphModule``. Dynamo does not go through ``__call__``."""
        code = super().recompile()
        compiled = type(self).forward

        @wraps(compiled)
        def forward(self: LoweredGraphModule, *args: Any) -> Any:
            return self.reference.forward(*args) if _is_captured() else compiled(self, *args)

        type(self).forward = forward
        return code

    def input_grids(self) -> tuple[Grid | None, ...]:
        """See ``ConvertedGraphModule``."""
        return self.reference.input_grids()

    def output_grids(self) -> tuple[Grid | None, ...]:
        """See ``ConvertedGraphModule``."""
        return self.reference.output_grids()

    def get_extra_state(self) -> Tensor:
        return self.reference.get_extra_state()

    def set_extra_state(self, state: Tensor) -> None:
        """Called while a model that holds this one loads a state; this one's parts load theirs afterwards."""
        self.reference.set_extra_state(state)
        self._lowering.is_stale = True

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """See ``QuantizationGraphModule``; the kernels then have the loaded weights and qparams."""
        keys = self.reference.load_state_dict(state_dict, strict=strict, assign=assign)
        self._lower_again()
        return keys

    def __deepcopy__(self, memo: dict[int, Any]) -> LoweredGraphModule:
        copied = lower(copy.deepcopy(self.reference, memo), self._lowering.engine)
        memo[id(self)] = copied
        return copied

    def train(self, mode: bool = True) -> Self:
        """See ``QuantizationGraphModule``."""
        changes = mode != self.training
        self.reference.train(mode)
        self.training = mode
        if changes:
            self._lower_again()
        return self

    def apply(self, fn: Callable[[nn.Module], Any]) -> Self:
        """See ``QuantizationGraphModule``."""
        self.reference.apply(fn)
        self._lower_again()
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        self.reference._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._lower_again()
        return self


def _is_captured() -> bool:
    """Whether torch.compile, torch.export or torch.jit is looking: none of them can take packed weights."""
    return torch.compiler.is_compiling() or torch._C._is_tracing()


def _lower_inside(
    reference: ConvertedGraphModule, engine: Engine
) -> tuple[LoweredGraphModule, tuple[Decision, ...]]:
    lowered = lower(reference, engine)
    return lowered, lowered.lowering
