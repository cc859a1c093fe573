"""The result of ``convert_fx`` on x86: a graph of integer kernels, and the reference graph it was made from.

Legacy: the GraphModule of ``convert_fx``, with modules of ``torch.ao.nn.quantized`` and packed weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from torch.fx.graph import PythonCode

from torchq_compat.custom_modules.recurrent.native.linear_calls import LINEAR_OPERATOR
from torchq_compat.graph.graph_module import (
    ConvertedGraphModule,
    ConvertedModel,
    QuantizationGraphModule,
    preserved_of,
    record_of,
)
from torchq_compat.graph.graph_readers import told_of_layers
from torchq_compat.graph.other_engines import refuse_torchao_prepare
from torchq_compat.graph.quantized_interface import take_integers
from torchq_compat.lower.x86.compiled.compiled_graph import compiled_graph
from torchq_compat.lower.x86.compiled.region_operator import Region, RegionTable, new_owner
from torchq_compat.lower.x86.direct_code import direct_forward
from torchq_compat.lower.x86.engines import Engine, packing_for, torchs_kernels_alone
from torchq_compat.lower.x86.lowered_calls import lower_opaque_modules
from torchq_compat.lower.x86.lowered_parts import MADE, share_state
from torchq_compat.lower.x86.lowering_pass import write_lowered_graph
from torchq_compat.lower.x86.plan import plan_graph
from torchq_compat.lower.x86.state_versions import StateVersions
from torchq_compat.lower.x86.trials import Trials
from torchq_compat.qspecs.qparams import QParams
from torchq_compat.support.decisions import Action, Decision

__all__ = ["LoweredGraphModule", "lower"]

#: Attribute that holds the ``_Lowering`` of a lowered model.
LOWERING = "_torchq_compat_lowering"
#: Attribute that holds the number of a lowered model; see ``new_owner``.
OWNER = "_torchq_compat_owner"
#: For a model that torch.compile never sees.
NOT_COMPILED = RegionTable(0)


@dataclass
class _Lowering:
    """The lowered graph made from ``reference``.

    Attributes:
        is_stale: whether qparams changed since the lowering.
        versions: versions of the state that the packed weights were made from.
        input_qparams: see ``ConvertedGraphModule``.
        trials: the outcomes of the kernel trials; loading the same state again repeats none.
        on_torchs_operators: the same model for TorchScript, once requested.
        compiled: the graph that torch.compile sees; None: the reference graph.
        regions: the regions of kernels that ``compiled`` and the modules inside call.
    """

    reference: ConvertedGraphModule
    engine: Engine
    is_stale: bool = True
    versions: StateVersions | None = None
    decisions: tuple[Decision, ...] = ()
    input_qparams: tuple[QParams | None, ...] = field(default=())
    trials: Trials = field(default_factory=Trials)
    on_torchs_operators: LoweredGraphModule | None = None
    compiled: GraphModule | None = None
    regions: Sequence[Region] = ()


def lower(
    reference: ConvertedGraphModule, engine: Engine, table: RegionTable | None = None
) -> LoweredGraphModule:
    """Return ``reference`` on the integer kernels of ``engine``; the result holds ``reference``.

    Args:
        table: the regions of the lowered model in which this one is called; None: it is no part of another.
    """
    lowered = LoweredGraphModule(nn.Module(), Graph())
    share_state(lowered, reference)
    lowered.meta = reference.meta
    vars(lowered)[LOWERING] = _Lowering(reference, engine)
    vars(lowered)[OWNER] = new_owner(lowered)
    for name, value in preserved_of(reference).items():
        setattr(lowered, name, value)
    lowered.training = reference.training
    lowered._lower_again(table)
    return lowered


class LoweredGraphModule(ConvertedModel):
    """A converted model that runs on integer kernels.

    The reference graph is the one source of truth: the parameters, buffers, submodules and state_dict are
    its own. The packed weights of the kernels are made from them, again whenever a state was loaded, moved or
    written in place.
    ``graph`` and ``code`` are what runs, in TorchScript too. torch.export sees the reference graph, which is
    portable; torch.compile sees a graph that calls the kernels, a region of them as one operator.
    """

    __jit_unused_properties__ = [*QuantizationGraphModule.__jit_unused_properties__, "_lowering"]  # noqa: RUF012

    @property
    def reference(self) -> ConvertedGraphModule:
        """The q-dq graph of ``convert_to_reference_fx``, which shares its state with this model."""
        return self._lowering.reference

    @property
    def lowering(self) -> tuple[Decision, ...]:
        """The decisions about the ops: the kernel each op runs on, or why it runs on none."""
        return self._lowering.decisions

    @property
    def _lowering(self) -> _Lowering:
        lowering: _Lowering = vars(self)[LOWERING]
        return lowering

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        lowering = self._lowering
        if not _is_captured():
            self.refresh_kernels()
            lowering = self._lowering
        elif self._portable() is lowering.reference:
            return lowering.reference(*args, **kwargs)
        if self.record.interface.inputs:
            bound = self.record.signature.bind(args, kwargs)
            return super().__call__(*take_integers(bound, lowering.input_qparams))
        return super().__call__(*args, **kwargs)

    def kernel_regions(self) -> Sequence[Region]:
        """Return the regions of integer kernels that torch.compile sees as operators, here and inside."""
        return self._lowering.regions

    def refresh_kernels(self) -> None:
        """Make the kernels again if the state they were made of has changed."""
        lowering = self._lowering
        if lowering.is_stale or lowering.versions is None or not lowering.versions.are_current():
            self._lower_again()

    def _lower_again(self, table: RegionTable | None = None) -> None:
        """Make the graph and the packed weights from the current reference graph; see ``lower``."""
        lowering, state = self._lowering, vars(self)
        table = RegionTable(state[OWNER]) if table is None else table
        with packing_for(lowering.engine), torch.no_grad():
            plan = plan_graph(
                lowering.reference, left_float=_left_float(lowering.reference), trials=lowering.trials
            )
            lower_inside = partial(_lower_inside, engine=lowering.engine, table=table)
            opaque_modules = (
                lower_opaque_modules(lowering.reference, lower_inside, table) if plan.runs_here else []
            )
            paths = {
                opaque.path: f"{MADE}.{opaque.name}" for opaque in opaque_modules if opaque.module is not None
            }
            in_floats = {
                opaque.path: opaque.module
                for opaque in opaque_modules
                if opaque.module is not None and opaque.module.opaque_in_floats
            }
            lowered = write_lowered_graph(lowering.reference, plan, paths, in_floats, MADE)
            inside = {
                each.path: each.module for each in opaque_modules if each.module and each.is_for_compiler
            }
            compiled = compiled_graph(lowering.reference, plan, table, inside)
        modules = {opaque.name: opaque.module for opaque in opaque_modules if opaque.module is not None}
        state[MADE] = _Made({**lowered.constants, **modules})
        state[LOWERING] = _Lowering(
            lowering.reference,
            lowering.engine,
            is_stale=False,
            versions=StateVersions(lowering.reference),
            decisions=(
                *plan.decisions,
                *(decision for opaque in opaque_modules for decision in opaque.decisions),
            ),
            input_qparams=lowering.reference.input_qparams(),
            trials=lowering.trials,
            compiled=compiled,
            regions=tuple(table.regions),
        )
        self.graph = lowered.graph

    def on_torchs_operators(self) -> LoweredGraphModule:
        """See ``QuantizationGraphModule``."""
        if not any(node.target is LINEAR_OPERATOR for node in self._graph.nodes):
            return self
        lowering = self._lowering
        if lowering.on_torchs_operators is None:
            with torchs_kernels_alone():
                lowering.on_torchs_operators = lower(lowering.reference, lowering.engine, NOT_COMPILED)
        return lowering.on_torchs_operators

    def packed_weights(self) -> Mapping[str, Any]:
        """See ``QuantizationGraphModule``."""
        made = vars(vars(self.on_torchs_operators()).get(MADE, _Made({}))).items()
        return {f"{MADE}_{name}": value for name, value in made if isinstance(value, torch.ScriptObject)}

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """See ``nn.Module``; includes the lowered modules that the graph calls. torch.export sees only the
        modules of the reference: a lowered module would show it the same parameter under a second name."""
        memo = set() if memo is None else memo
        yield from super().named_modules(memo, prefix, remove_duplicate)
        if _is_captured():
            return
        for name, module in vars(self).get(MADE, _Made({})).made_modules():
            path = ".".join(filter(None, (prefix, MADE, name)))
            yield from module.named_modules(memo, path, remove_duplicate)

    def _named_members(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        # Parameters and buffers are the reference's own, not the ones packed from them.
        yield from self.reference._named_members(*args, **kwargs)

    def delete_all_unused_submodules(self) -> None:
        """Delete what the reference graph does not use; the state of lowered modules is used there."""
        self.reference.delete_all_unused_submodules()

    @property
    def graph(self) -> Graph:
        """The graph that runs; for torch.export, which interprets it, the reference graph."""
        if "meta" in vars(self) and record_of(self) is not None:
            refuse_torchao_prepare(self.record.stage.value)
            told_of_layers(self.record.stage.value)
        return self.reference.graph if _is_captured() else self._graph

    @graph.setter
    def graph(self, graph: Graph) -> None:
        self._graph = graph
        graph.owning_module = self
        self.recompile()

    def recompile(self) -> PythonCode:
        """See ``torch.fx.GraphModule``. Dynamo bypasses ``__call__``."""
        code = super().recompile()
        compiled = direct_forward(code, self._graph)

        @wraps(type(self).forward)
        def forward(self: LoweredGraphModule, *args: Any) -> Any:
            return self._portable().forward(*args) if _is_captured() else compiled(self, *args)

        type(self).forward = forward
        return code

    def _portable(self) -> GraphModule:
        """Return the graph without packed weights: for torch.export the reference graph, which runs without
        this package, and for torch.compile one that calls the kernels."""
        lowering = self._lowering
        if lowering.compiled is None or lowering.is_stale or torch.compiler.is_exporting():
            return lowering.reference
        return lowering.compiled

    def input_qparams(self) -> tuple[QParams | None, ...]:
        """See ``ConvertedModel``."""
        return self.reference.input_qparams()

    def output_qparams(self) -> tuple[QParams | None, ...]:
        """See ``ConvertedModel``."""
        return self.reference.output_qparams()

    def get_extra_state(self) -> Tensor:
        return self.reference.get_extra_state()

    def set_extra_state(self, state: Tensor) -> None:
        """Mark the lowering as stale: called while an outer model loads a state, before the parts of this
        model load theirs."""
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

    def __copy__(self) -> LoweredGraphModule:
        """Return a deep copy: the weights of one model with the qparams of another compute nonsense."""
        return copy.deepcopy(self)

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


class _Made(nn.Module):
    """Packed weights and lowered modules, reachable from the graph but in no state."""

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        super().__init__()
        vars(self).update(attributes)

    def made_modules(self) -> Iterator[tuple[str, nn.Module]]:
        return ((name, value) for name, value in vars(self).items() if isinstance(value, nn.Module))


def _is_captured() -> bool:
    """Return whether torch.compile or torch.export is tracing: neither supports packed weights."""
    return torch.compiler.is_compiling()


def _left_float(reference: ConvertedGraphModule) -> dict[str, str]:
    """Return name of an op -> why the configuration leaves it float."""
    decisions = reference.record.decisions
    return {each.node: each.reason for each in decisions if each.action is Action.FLOAT and each.node}


def _lower_inside(
    reference: ConvertedGraphModule, engine: Engine, table: RegionTable
) -> tuple[LoweredGraphModule, tuple[Decision, ...]]:
    lowered = lower(reference, engine, table)
    return lowered, lowered.lowering
