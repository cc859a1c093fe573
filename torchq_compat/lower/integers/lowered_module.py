"""The result of ``convert_fx``: one graph on plain integers, and the reference graph it was made from."""

from __future__ import annotations

import copy
import operator
import re
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from torch.fx.graph import PythonCode

from torchq_compat.capture.loops.loop_module import LoopForm
from torchq_compat.capture.opaque_calls import OpaqueModule
from torchq_compat.capture.trial_runs import kept_buffers
from torchq_compat.codes import said
from torchq_compat.errors import ConfigError
from torchq_compat.lower.integers import opaque_modules, side_by_side
from torchq_compat.lower.integers.chains import TICKET, PlainForward
from torchq_compat.lower.integers.lowered_graph import CONSTANTS, Constants, share_state, with_modules
from torchq_compat.lower.integers.operators import forget_weights
from torchq_compat.lower.integers.qdq_graph import hand_on_qparams
from torchq_compat.lower.integers.rewrite import Rewriter
from torchq_compat.model import failed_calls
from torchq_compat.model.graph_module import (
    ConvertedGraphModule,
    ConvertedModel,
    QuantizationGraphModule,
    preserved_of,
    record_of,
)
from torchq_compat.model.quantized_interface import quantize_inputs
from torchq_compat.model.view_hooks import HOOKED, has_hooks
from torchq_compat.modules.standalone import ConvertedStandalone, standalone
from torchq_compat.quantize.passes import LOWER, carries_out, run_passes
from torchq_compat.read.qdq import is_dequantize
from torchq_compat.read.qparams import QParams
from torchq_compat.support import upstream
from torchq_compat.support.decisions import Action, Decision, warn_of_decisions
from torchq_compat.support.graph_nodes import give_back_freed
from torchq_compat.support.later_stages import is_captured_for_onnx
from torchq_compat.support.process_state import Lock, is_compiling

# The code of a lowered graph, which reads each tensor and module from the dictionary that holds it.


#: The prefix of names in the code.
NAME = "_torchq_compat_home_"
#: How ``nn.Module`` calls ``forward``, with hooks around it.
CALL = nn.Module.__call__
#: A line that calls an operator: what is before the call, and the operator in torch.ops.
OPERATOR_CALL = re.compile(r"^(    \w+ = )torch\.ops\.(\w+\.\w+\.\w+)\(", re.MULTILINE)


def direct_forward(
    code: PythonCode, graph: Graph, owner: nn.Module, *, calls_are_plain: bool = False
) -> Callable[..., Any]:
    """Return ``forward`` of ``code``, which was generated for ``graph``, on the state of ``owner``, with its
    operators looked up once.

    Args:
        calls_are_plain: whether no hooks of all modules and nothing that traces are there when it is called.
    """
    source, names, prefix = code.src, dict(code.globals), NAME
    while prefix in source:
        prefix += "_"

    def bound(call: re.Match[str]) -> str:
        name = f"{prefix}{call[2].replace('.', '_')}"
        names[name] = upstream.overload_caller(attrgetter(call[2])(torch.ops))
        return f"{call[1]}{name}("

    source = OPERATOR_CALL.sub(bound, source)
    reads = chain(graph.find_nodes(op="get_attr"), graph.find_nodes(op="call_module"))
    for index, node in enumerate(reads):
        path, _, key = str(node.target).rpartition(".")
        home = _home_of(owner.get_submodule(path), key)
        line = f"    {node.name} = {upstream.format_target('self', str(node.target))}"
        end = "(" if node.op == "call_module" else "\n"
        if home is None or line + end not in source:
            continue
        is_plain = calls_are_plain and node.op == "call_module"
        names[f"{prefix}{index}"] = _plain_caller(home, key, TICKET in node.kwargs) if is_plain else home
        read = f"{prefix}{index}" if is_plain else f"{prefix}{index}[{key!r}]"
        source = source.replace(line + end, f"    {node.name} = {read}{end}")
    forward: Callable[..., Any] = upstream.forward_from_src(source, names)
    return forward


def _plain_forward_of(graph: Graph, owner: nn.Module) -> Callable[..., Any]:
    return direct_forward(graph.python_code("self"), graph, owner, calls_are_plain=True)


def _plain_caller(home: dict[str, Any], key: str, asks_ticket: bool) -> Callable[..., Any]:
    """Return what calls the module in ``home``, or asks it for a ticket: without hooks, its ``forward``."""

    def call(*args: Any, **kwargs: Any) -> Any:
        module = home[key]
        is_hooked = module._forward_hooks or module._forward_pre_hooks
        is_hooked = is_hooked or module._backward_hooks or module._backward_pre_hooks
        is_own = type(module).__call__ is not CALL or module._compiled_call_impl is not None
        if not asks_ticket:
            return module(*args, **kwargs) if is_hooked or is_own else module.forward(*args, **kwargs)
        if is_hooked or is_own or "forward" in vars(module):
            raise RuntimeError("something is to be called around the module, or in its place")
        return module.opaque_ticket(*args)

    return call


def _home_of(module: nn.Module, key: str) -> dict[str, Any] | None:
    """Return the dictionary of ``module`` that holds its tensor or submodule ``key``."""
    homes: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, module._modules)
    return next((home for home in homes if key in home), None)


# Whether the state that packed weights were made from is unchanged.


counted_writes = attrgetter("_version")


def read_at_each_call(reference: GraphModule, graph: Graph) -> set[int]:
    """Return the ids of the tensors of which the lowered ``graph`` has each use that ``reference`` has: no
    constant was made of them."""
    uses = Counter[int]()
    for of, sign in ((reference.graph, 1), (graph, -1)):
        for node in of.find_nodes(op="get_attr"):
            if not str(node.target).startswith(f"{CONSTANTS}."):
                readers = [len(user.users) if is_dequantize(user) else 1 for user in node.users]
                uses[id(attrgetter(str(node.target))(reference))] += sign * sum(readers)
    return {key for key, count in uses.items() if count == 0}


class StateVersions:
    """The tensors of a module, and how often each was written in place, at construction.

    Writes that bypass torch's version counter, through ``tensor.data`` or numpy, are not detected.

    Args:
        live: ids of the tensors that may be: modules that have no others are not looked at.
    """

    def __init__(self, module: nn.Module, live: Collection[int]) -> None:
        homes = [home for item in module.modules() for home in (item._parameters, item._buffers)]
        homes = [home for home in homes if any(id(value) not in live for value in home.values())]
        # The end stands beside a tensor where there are more or fewer now.
        self._values: list[Any] = [*[home.values() for home in homes], [object()]]
        self._all = list(chain.from_iterable(self._values))
        self._tensors = [value for value in self._all[:-1] if value is not None and id(value) not in live]
        # Inference tensors count no versions, which never changes.
        self._counting = [tensor for tensor in self._tensors if not tensor.is_inference()]
        self._known = self._read()

    def are_current(self) -> bool:
        """Return whether none of these tensors was replaced, moved or written."""
        # Called before every model call, so written with loops that run in C where possible.
        is_same = all(map(operator.is_, chain.from_iterable(self._values), self._all))
        return is_same and self._read() == self._known

    def _read(self) -> tuple[list[int], list[int]] | None:
        """Return the addresses and version counts of all tensors; None if there are tensors of torch.func,
        which have no storage."""
        try:
            return list(map(upstream.data_address, self._tensors)), list(map(counted_writes, self._counting))
        except RuntimeError:
            return None


# The result of ``convert_fx``: one graph on plain integers, and the reference graph it was made from.
#
# Legacy: the GraphModule of ``convert_fx``, with modules of ``torch.ao.nn.quantized`` and packed weights.


#: Attribute that holds the ``_Lowering`` of a lowered model.
LOWERING = "_torchq_compat_lowering"
#: Held while a model is lowered again.
_LOWERING = Lock()
#: Attribute that holds what to call when its packed weights are no longer needed.
PACKED = "_torchq_compat_packed"
#: How often ops that are wrong on integers are left in floats before the rest is.
MOST_TRIALS = 5


@dataclass
class _Lowering:
    """The lowered graph made from ``reference``.

    Attributes:
        versions: of the state that constants of the graph were made from; None: others were loaded since.
        refused: name of an op -> why it does not run on integers here.
        generation: which of the graphs made so far it is.
        stands_for: see ``Rewriter``.
        given_up: why the whole graph is that of the reference; empty if it is not.
    """

    reference: ConvertedGraphModule
    versions: StateVersions | None = None
    decisions: tuple[Decision, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    generation: int = 0
    stands_for: side_by_side.StandsFor = field(default_factory=dict)
    given_up: str = ""

    @property
    def is_current(self) -> bool:
        return self.versions is not None and self.versions.are_current()


def lower(
    reference: ConvertedGraphModule,
    trial_inputs: tuple[Any, ...] | None = None,
    refused: Mapping[str, str] | None = None,
    given_up: str = "",
) -> LoweredGraphModule:
    """Return ``reference`` on plain integers; the result holds ``reference``.

    Args:
        trial_inputs: arguments to run both models on; None: they are not compared.
        refused: see ``_Lowering``: what is known of a copy.
        given_up: the same.
    """
    kind = LoweredStandalone if isinstance(reference, ConvertedStandalone) else LoweredGraphModule
    lowered = kind(nn.Module(), Graph())
    share_state(lowered, reference)
    lowered.meta = reference.meta
    vars(lowered)[LOWERING] = _Lowering(reference, refused=refused or {}, given_up=given_up)
    for name, value in preserved_of(reference).items():
        setattr(lowered, name, value)
    lowered.training = reference.training
    try:
        lowered._lower_again()
        fault = "" if trial_inputs is None else lowered._refuse_what_is_wrong(trial_inputs)
    except Exception as error:  # Integers are optional: the reference runs without.
        fault = f"it fails on integers ({type(error).__name__}: {side_by_side.first_line(error)})"
    if fault:
        lowered._lower_again(given_up=fault)
    if trial_inputs is not None:
        give_back_freed()
    return lowered


class LoweredGraphModule(ConvertedModel):
    """A converted model that runs on plain integers, in every form: called, exported, compiled, scripted.

    The reference graph is the one source of truth: the parameters, buffers, submodules and state_dict are
    its own, and the lowered graph reads them. Its own constants, tables most of all, are made from them again
    whenever a state was loaded, moved or written in place.
    """

    interpreter = side_by_side.Forgetful
    _plain_forward: PlainForward
    __jit_unused_properties__ = [*QuantizationGraphModule.__jit_unused_properties__, "_lowering"]  # noqa: RUF012

    @property
    def reference(self) -> ConvertedGraphModule:
        """The q-dq graph of ``convert_to_reference_fx``, which shares its state with this model."""
        return self._lowering.reference

    @property
    def lowering(self) -> tuple[Decision, ...]:
        """The decisions about the ops: how each runs on integers, or why it runs in floats."""
        return self._lowering.decisions

    @property
    def _lowering(self) -> _Lowering:
        lowering: _Lowering = vars(self)[LOWERING]
        return lowering

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not is_compiling():
            self._settle()
            if not kwargs and self._is_plain_call(args):
                # The way through nn.Module takes as long as a step of a small LSTM.
                try:
                    return self.call_again(*args)
                except failed_calls.FAILURES:
                    pass  # It explains them, and tells the line of the graph.
        elif is_captured_for_onnx():
            return self.reference(*args, **kwargs)
        assert self._lowering.generation > 0  # Dynamo compiles again when the number has changed.
        return super().__call__(*args, **kwargs)

    def _settle(self) -> None:
        super()._settle()
        if not is_compiling() and not self._lowering.is_current:
            with _LOWERING:  # Threads that call the model at once lower it once.
                if not self._lowering.is_current:
                    self._lower_again()

    def call_again(self, *args: Tensor) -> Any:
        """See ``QuantizationGraphModule``."""
        return self.forward(*args) if "forward" in vars(self) else self._plain_forward(self, args)

    def steps_at_once(
        self, form: LoopForm, states: Sequence[Tensor], wholes: Sequence[Tensor], same: Sequence[Tensor]
    ) -> tuple[Tensor, ...] | None:
        """See ``QuantizationGraphModule``."""
        if is_compiling() or "forward" in vars(self) or not (self._lowering.is_current and wholes[0].numel()):
            return None
        pairs = zip(form.parts, wholes[: len(wholes) - form.counted], strict=False)
        parts = [whole.select(part.dim, -1 if part.backward else 0) for part, whole in pairs]
        args = (*states, *parts, *same)
        if not self._is_plain_call(args):
            return None
        results: tuple[Tensor, ...] | None = self._plain_forward.loop(self, form, args, wholes)
        return results

    def _is_plain_call(self, args: tuple[Any, ...]) -> bool:
        """Return whether ``forward`` takes these arguments, and nothing else is to be called around it."""
        if has_hooks(self) or HOOKED or upstream.has_global_hooks():
            return False
        if self._backward_hooks or self._backward_pre_hooks or self._compiled_call_impl is not None:
            return False
        record = self.record
        return not (torch._C._is_tracing() or record.interface.inputs) and record.signature.knows(args)

    def _lower_again(self, refused: Mapping[str, str] | None = None, given_up: str = "") -> None:
        """Make the graph from the current reference graph; see ``_Lowering`` for the arguments."""
        before, state = self._lowering, vars(self)
        reference = before.reference
        refused = before.refused if refused is None else refused
        given_up = given_up or before.given_up
        opaque: list[opaque_modules.LoweredOpaqueModule] = []
        with torch.no_grad():
            rewriter = Rewriter(reference, {}, _left_float(reference), refused)
            elsewhere = side_by_side.why_not_here(reference)
            if elsewhere is None and given_up:
                reason = said("TQ432", fault=given_up)
                elsewhere = Decision("", "convert_fx", Action.REFERENCE, reason, warn=True, code="TQ432")
            if elsewhere is None:
                rewriter.run()
                opaque = opaque_modules.lower_opaque_modules(reference, lower)
        graph = rewriter.lowered.graph
        modules = {entry.path: entry.module for entry in opaque if entry.module}
        opaque_modules.hand_over_floats(graph, modules, rewriter.stands_for)
        graph.eliminate_dead_code(lambda node: node.op == "call_module" or node.is_impure())
        result = with_modules(reference, modules)
        decisions = (*rewriter.decisions(), *(decision for item in opaque for decision in item.decisions))
        if elsewhere is not None:
            decisions = (elsewhere,)
        state["_modules"] = {**result, CONSTANTS: Constants(rewriter.lowered.constants)}
        lowering = _Lowering(
            reference,
            versions=StateVersions(reference, read_at_each_call(reference, graph)),
            decisions=decisions,
            refused=refused,
            generation=before.generation + 1,
            stands_for=rewriter.stands_for,
            given_up=given_up,
        )
        self.graph = graph
        state[LOWERING] = lowering  # Last: other threads call the model as soon as it is current.
        self._forget_packed_weights()

    def _forget_packed_weights(self) -> None:
        """Drop what kernels packed of weights that are no longer in the state; at the end, of all."""
        state = vars(self)
        if (known := state.pop(PACKED, None)) is not None:
            known()
        weights = [buffer for buffer in self.reference.buffers() if buffer.dtype is torch.int8]
        addresses = [upstream.data_address(weight) for weight in weights if weight.device.type == "cpu"]
        state[PACKED] = weakref.finalize(self, forget_weights, addresses)
        state[PACKED].atexit = False

    def _refuse_what_is_wrong(self, trial_inputs: tuple[Any, ...]) -> str:
        """Leave ops in floats whose results on integers are not the reference's, on ``trial_inputs``; return
        what is wrong with the whole after that, or an empty string."""
        leaves = upstream.pytree.tree_leaves(trial_inputs, is_leaf=lambda leaf: leaf is None)
        for _ in range(MOST_TRIALS):
            lowering = self._lowering
            with kept_buffers(lowering.reference):
                compared = side_by_side.faults_of(
                    lowering.reference, self, lowering.stands_for, tuple(leaves)
                )
            if compared is None:
                return ""
            faults, expected = compared
            if not faults.keys() - lowering.refused.keys():
                return side_by_side.fault_of_whole(expected, lowering.reference, self, trial_inputs)
            self._lower_again({**lowering.refused, **faults})
        return f"after {MOST_TRIALS} trials ops are still wrong on integers"

    def shown_graph(self) -> Graph:
        """Return the graph that runs; for torch.onnx, which lacks its operators, that of the reference."""
        if record_of(self) is None:
            return self._graph
        return self.reference.graph if is_captured_for_onnx() else super().shown_graph()

    def _computed(self, code: PythonCode, forward: Callable[..., Any]) -> Callable[..., Any]:
        """See ``QuantizationGraphModule``.

        The state is read past ``nn.Module.__getattr__``, which takes as long as a small kernel; for
        torch.compile it is not, since that has to know where a tensor is from.
        """
        own, direct = type(self), direct_forward(code, self._graph, self)
        if "__call__" in vars(own):
            del own.__call__  # It calls this class's, in two steps, and prints what failed_calls tells.
        own._plain_forward = PlainForward(self._graph, direct, _plain_forward_of)

        def computed(self: LoweredGraphModule, *args: Any, **kwargs: Any) -> Any:
            return (forward if is_compiling() else direct)(self, *args, **kwargs)

        return computed

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of the reference: what is lowered inside this model has no other."""
        return self.reference.state_dict(*args, **kwargs)

    def delete_all_unused_submodules(self) -> None:
        """Delete what the reference graph does not use; the state of lowered modules is used there."""
        self.reference.delete_all_unused_submodules()

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
        self._lowering.versions = None

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """See ``QuantizationGraphModule``; the graph then has the loaded qparams."""
        keys = self.reference.load_state_dict(state_dict, strict=strict, assign=assign)
        self._lower_again()
        return keys

    def __deepcopy__(self, memo: dict[int, Any]) -> LoweredGraphModule:
        known = self._lowering
        copied = lower(copy.deepcopy(self.reference, memo), refused=known.refused, given_up=known.given_up)
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
        self.reference._apply(fn, recurse)
        self._lower_again()
        return self


@standalone
class LoweredStandalone(OpaqueModule, LoweredGraphModule):
    """A lowered standalone module."""

    def opaque_call(self, *args: Any, **kwargs: Any) -> Any:
        bound = self.record.signature.bind(args, kwargs)
        return LoweredGraphModule.__call__(self, *quantize_inputs(bound, self.input_qparams()))


def _left_float(reference: ConvertedGraphModule) -> dict[str, str]:
    """Return name of an op -> why the configuration leaves it float."""
    decisions = reference.record.decisions
    return {
        decision.node: decision.reason
        for decision in decisions
        if decision.action is Action.FLOAT and decision.node
    }


# Lower a model that ``convert_fx`` converted.


#: The engines that torch knows; ``none`` if it was built without any. All run on the same kernels here: their
#: names only chose the qparams, in the QConfig.
KNOWN_ENGINES = ("x86", "onednn", "fbgemm", "qnnpack", "none")


def lower_to_integers(
    reference: ConvertedGraphModule, trial_inputs: tuple[Any, ...] | None
) -> ConvertedModel:
    """Return ``reference`` on plain integers.

    Args:
        trial_inputs: arguments to run both on.

    Raises:
        ConfigError: an engine that torch does not have.
    """
    name = torch.backends.quantized.engine
    if name not in KNOWN_ENGINES:
        raise ConfigError.of("TQ910.engine", name=name, engines=", ".join(KNOWN_ENGINES))
    state = _LoweringModel(reference, trial_inputs)
    run_passes(LOWER, state, reference)
    return state.lowered


class _LoweringModel:
    """What the passes of lower hand on; see ``LOWER``."""

    lowered: LoweredGraphModule

    def __init__(self, reference: ConvertedGraphModule, trial_inputs: tuple[Any, ...] | None) -> None:
        self.reference = reference
        self.trial_inputs = trial_inputs


@carries_out(LOWER, "hand qparams on")
def _hand_on(state: _LoweringModel) -> None:
    hand_on_qparams(state.reference)


@carries_out(LOWER, "rewrite to plain integers")
def _rewrite(state: _LoweringModel) -> None:
    state.lowered = lower(state.reference, state.trial_inputs)


@carries_out(LOWER, "tell")
def _tell(state: _LoweringModel) -> None:
    warn_of_decisions(state.lowered.lowering)
