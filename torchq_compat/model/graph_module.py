"""The GraphModules that prepare_fx and convert_fx return; they are called like the float model."""

from __future__ import annotations

import re
import sys
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial, wraps
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Interpreter, Proxy
from torch.fx.graph import PythonCode

from torchq_compat import errors
from torchq_compat.annotate.observed_graph import ObservedPlace, observer_label, observer_nodes
from torchq_compat.capture.loops.loop_module import LoopForm
from torchq_compat.capture.training import STALE, freeze_batch_norm, set_training, settle
from torchq_compat.model import failed_calls, other_tools, quantized_interface, views
from torchq_compat.model import state as states
from torchq_compat.model.quantized_boundary import refresh_boundaries
from torchq_compat.model.signature import CallSignature
from torchq_compat.model.view_hooks import HOOKED, calling_hooks, is_of_a_hook
from torchq_compat.read.backend_configs import BackendTable
from torchq_compat.read.qconfig_mappings import QConfigRules
from torchq_compat.read.qdq import WeightByWeight
from torchq_compat.read.qparams import QParams
from torchq_compat.support import later_stages, metadata
from torchq_compat.support.argument_checks import listed
from torchq_compat.support.decisions import Decision
from torchq_compat.support.graph_nodes import copied_weights, follow_devices
from torchq_compat.support.process_state import TURNS, is_compiling, is_exporting, own_attribute
from torchq_compat.support.sharded import call_hooks_of_parts, of_class_before
from torchq_compat.support.torch_ao import freeze_bn_stats, update_bn_stats
from torchq_compat.support.upstream import USER_PRESERVED_ATTRIBUTES_KEY, pytree
from torchq_compat.support.user_warnings import is_of_treespec, silenced

#: The path of a float model that is a custom module itself, in the module that wraps it.
ROOT = "module"
#: An attribute of FX's converted models: ``conv1_input_scale_0``, ``_packed_weight_0``.
QPARAMS_OF_FX = re.compile(r".*_(scale|zero_point|packed_weight)_\d+")
#: Attribute of a prepared model: its ``LastCall``.
LAST_CALL = "_torchq_compat_last_call"
#: Legacy switch -> whether batch norms are frozen.
BATCH_NORM_SWITCHES = {
    freeze_bn_stats: True,
    update_bn_stats: False,
}


class Stage(Enum):
    PREPARED = "prepared"
    CONVERTED = "converted"


@dataclass(frozen=True)
class ModelRecord:
    """Facts about a model of this package, in ``GraphModule.meta``; frozen, so that copies of the model share
    them.

    Attributes:
        rules: the QConfigMapping the model was prepared with; None if a torchao Quantizer was given instead.
        backend: the BackendConfig the model was prepared with; None as for ``rules``.
        is_custom_module: whether the float model is a custom module itself; see ``modules.registry``.
        modules: path -> facts about that module of the float model.
        batch_norms: path of every captured batch norm -> path of the op it follows.
        steps: paths of the models that run one step of a loop; the modules in them can also be reached
            without these prefixes.
        observed: the places that prepare observes.
        fx_converts_otherwise: paths of the ops that FX converts to other qparams or ranges than they trained
            with; from convert on.
        observer_qparams: whether it was converted to those.
        trial_inputs: arguments that the float model took, for trials; None from convert on.
    """

    stage: Stage
    signature: CallSignature
    decisions: tuple[Decision, ...]
    is_qat: bool
    rules: QConfigRules | None
    interface: quantized_interface.QuantizedInterface = field(
        default_factory=quantized_interface.QuantizedInterface
    )
    backend: BackendTable | None = None
    is_custom_module: bool = False
    modules: Mapping[str, views.ModuleFacts] = field(default_factory=dict)
    batch_norms: Mapping[str, str] = field(default_factory=dict)
    steps: tuple[str, ...] = ()
    observed: tuple[ObservedPlace, ...] = ()
    fx_converts_otherwise: tuple[str, ...] = ()
    observer_qparams: bool = False
    trial_inputs: tuple[Any, ...] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


@dataclass(frozen=True)
class LastCall:
    """The last call of a prepared model in evaluation, by reference; copies of the model share it."""

    args: tuple[Any, ...]
    result: Any

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


class QuantizationGraphModule(GraphModule):
    """A captured model that supports the float model's call forms, ``train()`` and ``eval()``."""

    #: Properties that torch.jit.trace would compile.
    __jit_unused_properties__ = [  # noqa: RUF012 - torch.fx has a list there
        "graph",
        "code",
        "_boxed_call",
        "reference",
        "lowering",
        "record",
        "is_prepared",
        "__jit_ignored_attributes__",
    ]

    @classmethod
    def wrap(cls, graph_module: GraphModule, record: ModelRecord, preserved: Mapping[str, Any]) -> Self:
        """Return ``graph_module`` as this class, with the ``preserved`` attributes of the float model."""
        wrapped = cls(graph_module, graph_module.graph)
        wrapped.meta.update(graph_module.meta)
        metadata.RECORD.write(wrapped, record)
        # GraphModule.__deepcopy__ copies only the attributes named under this key.
        wrapped.meta[USER_PRESERVED_ATTRIBUTES_KEY] = dict(preserved)
        other_tools.guard(wrapped, record.stage.value)
        for name, value in preserved.items():
            setattr(wrapped, name, value)
        wrapped.train(record.stage is Stage.PREPARED and record.is_qat)
        if record.stage is Stage.PREPARED:
            views.install_prepared_views(wrapped, record.modules)
        return wrapped

    @property
    def graph(self) -> Graph:
        return self.shown_graph()

    @graph.setter
    def graph(self, graph: Graph) -> None:
        GraphModule.graph.fset(self, graph)  # type: ignore[attr-defined]

    def shown_graph(self) -> Graph:
        """Return the graph for who reads ``graph``: for torch.export, which interprets it, one call."""
        record = record_of(self)
        if record is not None:
            other_tools.refuse_reader(record.stage.value, self._graph)
            other_tools.tell_of_layers(record.stage.value)
            if _is_exported_alone() and other_tools.is_read_by_an_interpreter():
                return _graph_of_a_call(self._called_in_export)
        return self._graph

    def _called_in_export(self, args: tuple[Any, ...]) -> Any:
        return self.record.signature.call(Interpreter(self, graph=self._exported_graph()).run, args)

    def _exported_graph(self) -> Graph:
        """Return the graph for exported programs, with operators that every runtime has."""
        return self._graph

    @property
    def reference(self) -> QuantizationGraphModule:
        """The model that the decisions of ``record`` describe: this one, unless it was lowered."""
        return self

    @property
    def lowering(self) -> tuple[Decision, ...]:
        """The decisions made after conversion."""
        return ()

    @property
    def record(self) -> ModelRecord:
        record: ModelRecord = metadata.RECORD.required(self)
        return record

    def _settle(self) -> None:
        """Finish what a change of the model left for its next call."""
        if STALE in self.__dict__:
            settle(self)

    def call_again(self, *args: Tensor) -> Any:
        """Call the model with other values for arguments with which it was just called."""
        return self.forward(*args)

    def steps_at_once(
        self, form: LoopForm, states: Sequence[Tensor], wholes: Sequence[Tensor], same: Sequence[Tensor]
    ) -> tuple[Tensor, ...] | None:
        """Return what ``run_steps`` does with this model as the step; None if it cannot be one call."""
        return None

    def recompile(self) -> PythonCode:
        """See ``torch.fx.GraphModule``; in the class of ``fully_shard`` its call would call itself."""
        with of_class_before(self):
            code = super().recompile()
            own = type(self)
            computed = self._computed(code, own.forward)

            @wraps(own.forward)
            def forward(self: QuantizationGraphModule, *args: Any, **kwargs: Any) -> Any:
                if torch.compiler.is_dynamo_compiling():  # It sees no frames.
                    args, kwargs = self.record.signature.bind(args, kwargs), {}
                elif other_tools.is_called_by_a_user():
                    self._settle()
                    return self.record.signature.call(partial(computed, self), args, kwargs)
                return computed(self, *args, **kwargs)

            own.forward = forward
        return code

    def _computed(self, code: PythonCode, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return what ``forward`` computes, where ``forward`` is that of ``code``."""
        return forward

    def add_decisions(self, decisions: tuple[Decision, ...]) -> None:
        """Add ``decisions`` about the finished model to its record."""
        metadata.RECORD.write(self, replace(self.record, decisions=(*self.record.decisions, *decisions)))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        record, is_compiled = self.record, is_compiling()
        self._settle()
        is_traced = not is_compiled and torch._C._is_tracing()
        if not is_compiled:
            call_hooks_of_parts(self)
        if is_traced and torch.onnx.is_in_onnx_export():
            raise errors.ExportError.of("TQ933.old_exporter", stage=record.stage.value)
        bound = args
        if is_compiled or is_traced or kwargs or not record.signature.knows(args):
            bound = record.signature.by_position(args, kwargs)
            if (at_other_rank := record.signature.at_other_rank(bound)) is not None:
                return at_other_rank(self)
            record.signature.check(bound)
            if not is_compiled and any(isinstance(arg, Proxy) for arg in bound):
                other_tools.leaves_for_tracers(self)
                return super().__call__(*bound)
            # Dynamo cannot trace the access to the graph, and compares structures itself.
            if not is_compiled:
                failed_calls.check_structure(self.reference, bound)
            if not is_compiled and not is_traced:
                if failed_calls.has_example_dtypes(self.reference, bound):
                    record.signature.accept(bound)
                elif self.reference is not self:
                    # Its quantize nodes refuse what the kernels would read as integers on their own qparams.
                    return self.reference(*bound)
        if is_traced:
            return later_stages.stage("scripted_graph")(self).call(bound)
        try:
            observes = record.stage is Stage.PREPARED
            hooked = views.hooked_views(self.reference) if HOOKED and not is_compiled else {}
            if is_compiled or not (observes or hooked):
                return super().__call__(*bound)
            with TURNS, calling_hooks(self, hooked) if hooked else nullcontext():
                result = super().__call__(*bound)
            if observes and not self.training:
                detached = pytree.tree_map_only(Tensor, Tensor.detach, result)
                vars(self)[LAST_CALL] = LastCall(bound, detached)
            return result
        except failed_calls.FAILURES as cause:
            error = None if is_of_a_hook(cause) else self._explained(bound, cause)
            if error is None:
                raise
            raise error from cause

    @property
    def is_prepared(self) -> bool:
        return self.record.stage is Stage.PREPARED

    @property
    def __jit_ignored_attributes__(self) -> list[str]:
        """The names torch.jit.trace skips: it would compile what submodules export, and the scripted graph
        calls none of them."""
        return ["is_prepared", *self._modules]

    def __dir__(self) -> list[str]:
        names = set(super().__dir__())  # type: ignore[no-untyped-call]
        # torch.jit would compile the ignored names too if it found them here.
        if other_tools.is_asked_by_torch_jit():
            private = {name for name in vars(self) if name.startswith("_torchq_compat")}
            return sorted(names - set(self._modules) - private)
        return sorted(names - {"torchscript_observes"})

    @torch.jit.export
    def torchscript_observes(self) -> bool:
        """Return False. torch.jit.trace reads ``__jit_ignored_attributes__`` only if a method is exported."""
        return False

    def __prepare_scriptable__(self) -> nn.Module:
        """Return a plain module with the same computation, which torch.jit.script calls for and compiles.

        Raises:
            ExportError: a module or operator has no form in TorchScript.
        """
        module: nn.Module = later_stages.stage("scripted_graph")(self).module()
        return module

    def _explained(self, args: tuple[Any, ...], cause: Exception) -> errors.TorchQCompatError | None:
        """Return the error that explains a failed call; None if ``cause`` says enough itself."""
        if isinstance(cause, errors.TorchQCompatError) or is_compiling():
            return None
        stage = self.record.stage
        if stage is Stage.PREPARED and not self.record.is_qat and isinstance(cause, RuntimeError):
            place = _failing_observer(self, cause)
            if place is not None:
                return errors.ConvertError.of("TQ951", place=place, cause=cause)
        return failed_calls.explain_failed_call(self.reference, stage.value, args, cause)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Call ``nn.Module.named_children``; refuse torch.ao's tools."""
        if not torch.compiler.is_dynamo_compiling():  # It cannot look at frames.
            other_tools.refuse_tools(sys._getframe(1))
        return super().named_children()

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """Call ``nn.Module.named_modules``; refuse torch.ao's tools."""
        if not torch.compiler.is_dynamo_compiling():  # It cannot look at frames.
            other_tools.refuse_tools(sys._getframe(1))
        modules: Iterator[tuple[str, nn.Module]] = super().named_modules(*args, **kwargs)
        return modules

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state as ``nn.Module.state_dict`` does; iterating over it refuses torch.ao's tools."""
        if not args and kwargs.get("destination") is None:
            kwargs["destination"] = other_tools.StateOfCaptured(model=self)
            kwargs["destination"]._metadata = OrderedDict()
        with TURNS if self.is_prepared else nullcontext():
            return super().state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state as ``nn.Module.load_state_dict`` does; if it does not fit, the model is unchanged.

        Raises:
            CheckpointError: ``state_dict`` is not a state, has missing or unexpected keys, shapes or dtypes
                that do not fit, or invalid qparams.
        """
        checked = states.check_state(state_dict, self)
        foreign = (
            sorted(state_dict.keys() - self.state_dict().keys()) if states.is_fx_state(state_dict) else []
        )
        if foreign:
            loader = states.fx_state_loader()
            if loader is None:
                raise errors.CheckpointError.of("TQ960.fx_names", names=listed(foreign, 3))
            return loader(self, state_dict)
        devices = {name: value.device for name, value in self.named_buffers()}
        load = partial(super().load_state_dict, assign=assign)
        result = states.load_whole(self, checked, load, strict=strict)
        for name, value in self.named_buffers():
            if not assign and value.device != devices.get(name, value.device):
                value.data = value.to(devices[name])
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        with TURNS if self.is_prepared else nullcontext(), silenced(is_of_treespec, FutureWarning):
            memo.update(copied_weights(self, memo))
            copied = cast("Self", super().__deepcopy__(memo))
        if copied.record.stage is Stage.PREPARED:
            views.install_prepared_views(copied, copied.record.modules)
        return copied

    def __setattr__(self, name: str, value: Any) -> None:
        views.check_kept(self, name, value)
        super().__setattr__(name, value)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Add a module as ``nn.Module`` does.

        Raises:
            ModuleAttributeError: a view stands there.
        """
        views.check_kept(self, name, module)
        super().add_module(name, module)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            record = record_of(self) if "meta" in vars(self) else None
            for path in record.steps if record is not None and not name.startswith(("_", "loop")) else ():
                step = self.get_submodule(path)
                if name in step._modules:
                    return step._modules[name]
            if QPARAMS_OF_FX.fullmatch(name):
                if (qparam := views.qparam_by_fx_name(self.reference, name)) is not None:
                    return qparam
                raise errors.ModuleAttributeError.of("TQ970.fx_qparams", name=name) from None
            if record is None or not record.is_custom_module or name == ROOT:
                raise
            return getattr(self.get_submodule(ROOT), name)

    def _get_name(self) -> str:
        # A tracer reads the name of its root first.
        other_tools.refuse_fx_tracer(self, self.record.stage.value)
        return type(self).__name__

    def __reduce__(self) -> Any:
        raise errors.CheckpointError.of("TQ960.pickled", stage=self.record.stage.value)

    def train(self, mode: bool = True) -> Self:
        """Set the mode of dropout and batch norm, in the graph and in every module it calls."""
        with own_attribute(self, views.SWITCHING, True):
            super().train(mode)
        set_training(self, mode)
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        follow_devices(self, fn)
        return self

    def apply(self, fn: Callable[[nn.Module], Any]) -> Self:
        """Call ``nn.Module.apply``; for torch.ao's batch norm switches, switch the batch norms of the graph.

        These switches look for classes of fused QAT modules, which a captured model does not have.
        """
        if fn in BATCH_NORM_SWITCHES:
            freeze_batch_norm(self, BATCH_NORM_SWITCHES[fn])
            return self
        return super().apply(fn)


class ConvertedModel(QuantizationGraphModule):
    """A quantized model, as ``convert_fx`` and ``convert_to_reference_fx`` return it."""

    #: Runs the graph and keeps of no weight what is computed of it.
    interpreter: type[Interpreter] = WeightByWeight

    def saving_memory(self) -> AbstractContextManager[None]:
        """Let calls run by ``interpreter``."""
        return own_attribute(self, "forward", self.interpreter(self).run)

    @property
    def reference(self) -> ConvertedModel:
        """The q-dq graph of ``convert_to_reference_fx``: this model itself, unless it was lowered."""
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.record.interface.inputs:
            return super().__call__(*args, **kwargs)
        bound = self.record.signature.by_position(args, kwargs)
        return super().__call__(*quantized_interface.take_integers(bound, self.input_qparams()))

    def input_qparams(self) -> tuple[QParams | None, ...]:
        """Return, for each flat input, the qparams of its integers; None if the input is not quantized."""
        raise NotImplementedError

    def output_qparams(self) -> tuple[QParams | None, ...]:
        """Return, for each flat output, the qparams of its integers; None if the output is not quantized."""
        raise NotImplementedError


class ConvertedGraphModule(ConvertedModel):
    """A q-dq graph, with all qparams in its state_dict, and views in place of the float model's modules."""

    @classmethod
    def wrap(cls, graph_module: GraphModule, record: ModelRecord, preserved: Mapping[str, Any]) -> Self:
        """See ``QuantizationGraphModule``."""
        quantized_interface.return_structure(graph_module.graph)
        wrapped = super().wrap(graph_module, record, preserved)
        views.install_views(wrapped, record.modules)
        wrapped._note_input_qparams()
        return wrapped

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = super().__deepcopy__(memo)
        views.install_views(copied, copied.record.modules)
        return copied

    def get_extra_state(self) -> Tensor:
        return states.qparams_state(self)

    def set_extra_state(self, state: Tensor) -> None:
        """See ``set_qparams_state``."""
        states.set_qparams_state(self, state)

    def input_qparams(self) -> tuple[QParams | None, ...]:
        """See ``ConvertedModel``."""
        if torch.compiler.is_dynamo_compiling():
            qparams: tuple[QParams | None, ...] = metadata.INPUT_QPARAMS.required(self)
            return qparams
        return quantized_interface.input_qparams(self, self.record.interface)

    def _note_input_qparams(self) -> None:
        if record_of(self) is not None:
            metadata.INPUT_QPARAMS.write(self, self.input_qparams())

    def output_qparams(self) -> tuple[QParams | None, ...]:
        """See ``ConvertedModel``."""
        return quantized_interface.output_qparams(self, self.record.interface)

    def shown_graph(self) -> Graph:
        """Return the q-dq graph; for torch.export and torch.onnx, which interpret it, one call."""
        if self._is_asked_for_onnx():
            return _graph_of_a_call(partial(later_stages.run_for_onnx, self))
        return super().shown_graph()

    def _exported_graph(self) -> Graph:
        return states.with_plain_tables(self, self._graph) or self._graph

    def recompile(self) -> PythonCode:
        """See ``torch.fx.GraphModule``."""
        code = super().recompile()
        self._note_input_qparams()
        return code

    def _computed(self, code: PythonCode, forward: Callable[..., Any]) -> Callable[..., Any]:
        """See ``QuantizationGraphModule``. torch.export calls ``forward`` inside another model."""
        plain = states.with_plain_tables(self, self._graph)
        if plain is None:
            return forward
        exported = type(GraphModule(self, plain)).forward

        def computed(self: ConvertedGraphModule, *args: Any, **kwargs: Any) -> Any:
            return (exported if _is_exported_alone() else forward)(self, *args, **kwargs)

        return computed

    def _is_asked_for_onnx(self) -> bool:
        return later_stages.is_captured_for_onnx() and record_of(self) is not None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_asked_for_onnx():
            return later_stages.run_for_onnx(self, self.record.signature.bind(args, kwargs))
        return super().__call__(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """See ``QuantizationGraphModule``."""
        keys = super().load_state_dict(state_dict, strict=strict, assign=assign)
        # The cells have new qparams now, so the boundaries around them are refreshed.
        for module in reversed(list(self.modules())):
            if isinstance(module, ConvertedGraphModule):
                refresh_boundaries(module)
        return keys


def _is_exported_alone() -> bool:
    """Return whether ``torch.export.export`` is capturing; ``torch.onnx.export`` runs the graph itself."""
    return is_exporting() and not torch.onnx.is_in_onnx_export()


def _graph_of_a_call(call: Callable[[tuple[Any, ...]], Any]) -> Graph:
    """Return a graph that is one ``call``, given the arguments: torch.export interprets the graph of a
    GraphModule, and calls neither its hooks nor its ``forward``."""
    graph = Graph()
    args = graph.placeholder("*args")
    graph.output(graph.call_function(lambda given: call(tuple(given)), (args,)))
    return graph


def preserved_of(model: GraphModule) -> dict[str, Any]:
    """Return the preserved attributes of ``model``, which this package made."""
    preserved: dict[str, Any] = model.meta.get(USER_PRESERVED_ATTRIBUTES_KEY, {})
    return dict(preserved)


def _failing_observer(model: nn.Module, cause: BaseException) -> str | None:
    """Return the place in ``model`` of the innermost observer on the stack of ``cause``; None if none is."""
    paths = {
        observer: ".".join(filter(None, (prefix, observer_label(node))))
        for prefix, graph_module in model.named_modules()
        if isinstance(graph_module, GraphModule)
        for node, observer in observer_nodes(graph_module)
    }
    frames = [frame for frame, _ in traceback.walk_tb(cause.__traceback__)]
    owners = (frame.f_locals.get("self") for frame in reversed(frames))
    return next((paths[owner] for owner in owners if isinstance(owner, nn.Module) and owner in paths), None)


def record_of(model: object) -> ModelRecord | None:
    """Return the record of ``model``; None if this package did not make it."""
    meta = getattr(model, "meta", None)
    record = meta.get(metadata.RECORD.name) if isinstance(meta, dict) else None
    return record if isinstance(record, ModelRecord) else None
