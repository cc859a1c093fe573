"""The GraphModules that prepare_fx and convert_fx return: they behave like the model they came from."""

from __future__ import annotations

import sys
import threading
import traceback
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import wraps
from types import FrameType
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from torch.fx.graph import PythonCode

from torchq_compat import batch_norm
from torchq_compat.capture.call_signature import CallSignature
from torchq_compat.capture.training_modes import set_training
from torchq_compat.config.backend_configs import BackendTable
from torchq_compat.config.qconfig_mappings import QConfigRules
from torchq_compat.errors import CalibrationError, CheckpointError, OnnxError, TorchQCompatError
from torchq_compat.fx_state.accepting import fx_state_loader
from torchq_compat.fx_state.given import is_fx_state
from torchq_compat.graph.failed_calls import (
    FAILURES,
    check_structure,
    explain_failed_call,
    has_structure,
    structure_of,
)
from torchq_compat.graph.module_views import ModuleFacts, hooked_views, install_views
from torchq_compat.graph.numeric_suite import StateOfCaptured, refuse_numeric_suite
from torchq_compat.graph.observed_graph import observer_label, observer_nodes
from torchq_compat.graph.other_engines import guard, refuse_fx_tracer, refuse_torchao_prepare
from torchq_compat.graph.plain_tables import with_plain_tables
from torchq_compat.graph.prepared_views import install_prepared_views
from torchq_compat.graph.qparams_state import qparams_state, set_qparams_state
from torchq_compat.graph.quantized_interface import (
    QuantizedInterface,
    input_qparams,
    output_qparams,
    take_integers,
)
from torchq_compat.graph.state_checks import check_state
from torchq_compat.graph.view_hooks import HOOKED, calling_hooks, is_of_a_hook
from torchq_compat.opaque_calls.quantized_boundary import refresh_boundaries
from torchq_compat.qspecs.loaded_qparams import adopt_loaded_qparams
from torchq_compat.qspecs.qparams import QParams
from torchq_compat.support import metadata
from torchq_compat.support.decisions import Decision
from torchq_compat.support.later_stages import (
    graph_for_onnx,
    is_captured_for_onnx,
    run_for_onnx,
    scripted_graph,
)
from torchq_compat.support.model_copies import copied_weights
from torchq_compat.support.torch_ao import freeze_bn_stats, update_bn_stats
from torchq_compat.support.upstream import USER_PRESERVED_ATTRIBUTES_KEY

if TYPE_CHECKING:
    from torchq_compat.lower.torchscript.scripted import ScriptedGraph

__all__ = [
    "ROOT",
    "ConvertedGraphModule",
    "ConvertedModel",
    "ModelRecord",
    "QuantizationGraphModule",
    "Stage",
    "is_traced_by_jit",
    "preserved_of",
    "record_of",
]

_CALIBRATION = threading.RLock()
#: Where a float model that is a custom module itself stands in its parent.
ROOT = "module"
#: Attribute that holds the structure of the arguments, and what it was read from.
STRUCTURE = "_torchq_compat_structure"
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
    """Facts about a model that this package made; frozen, so that copies of the model share them. It travels
    in ``GraphModule.meta``.

    Attributes:
        rules: the QConfigMapping it was prepared with; None where a torchao Quantizer was given instead.
        backend: the BackendConfig it was prepared with; None as for ``rules``.
        is_custom_module: whether the float model is a custom module itself; see ``custom_modules.root``.
        modules: what is known of the modules of the float model, by path.
        batch_norms: path of every batch norm that was captured -> path of the op it follows.
        steps: paths of the models that are called for each step of a loop: what is in them is reachable
            without these names too.
    """

    stage: Stage
    signature: CallSignature
    decisions: tuple[Decision, ...]
    is_qat: bool
    rules: QConfigRules | None
    interface: QuantizedInterface = field(default_factory=QuantizedInterface)
    backend: BackendTable | None = None
    is_custom_module: bool = False
    modules: Mapping[str, ModuleFacts] = field(default_factory=dict)
    batch_norms: Mapping[str, str] = field(default_factory=dict)
    steps: tuple[str, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


def is_asked_by_torch_jit(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).startswith(("torch.jit", "torch._jit_internal"))


def is_traced_by_jit() -> bool:
    """Whether torch.jit.trace is looking, which would fix every size: it gets the scripted graph."""
    return not torch.compiler.is_compiling() and bool(torch._C._is_tracing())


class QuantizationGraphModule(GraphModule):
    """A captured model that takes the float model's call forms, ``train()`` and ``eval()``."""

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
        # GraphModule.__deepcopy__ carries what stands under this key, and only that.
        wrapped.meta[USER_PRESERVED_ATTRIBUTES_KEY] = dict(preserved)
        guard(wrapped, record.stage.value)
        for name, value in preserved.items():
            setattr(wrapped, name, value)
        wrapped.train(record.stage is Stage.PREPARED and record.is_qat)
        if record.stage is Stage.PREPARED:
            install_prepared_views(wrapped, record.modules)
        return wrapped

    @property
    def graph(self) -> Graph:
        record = record_of(self)
        if record is not None:
            refuse_torchao_prepare(record.stage.value)
        return GraphModule.graph.fget(self)  # type: ignore[attr-defined, no-any-return]

    @graph.setter
    def graph(self, graph: Graph) -> None:
        GraphModule.graph.fset(self, graph)  # type: ignore[attr-defined]

    @property
    def reference(self) -> QuantizationGraphModule:
        """The graph that the decisions of ``record`` are about: this one, unless it was lowered."""
        return self

    @property
    def lowering(self) -> tuple[Decision, ...]:
        """The decisions taken after conversion."""
        return ()

    @property
    def record(self) -> ModelRecord:
        return metadata.RECORD.required(self)

    def add_decisions(self, decisions: tuple[Decision, ...]) -> None:
        """Add what was found out about the finished model."""
        record = replace(self.record, decisions=(*self.record.decisions, *decisions))
        metadata.RECORD.write(self, record)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        record, is_compiled = self.record, torch.compiler.is_compiling()
        is_traced = not is_compiled and torch._C._is_tracing()
        if is_traced and torch.onnx.is_in_onnx_export():
            raise _old_exporter(record.stage.value)
        bound = args
        if is_compiled or is_traced or not record.signature.knows(args, kwargs):
            bound = record.signature.bind(args, kwargs)
            # Dynamo cannot look at the graph, and compares structures itself.
            if not is_compiled and not self._has_structure(bound):
                check_structure(self.reference, bound)
            if not is_compiled and not is_traced:
                record.signature.accept(bound)
        if is_traced:
            for name in self.packed_weights():
                vars(self).pop(name, None)
            return self._scripted().call(bound)
        try:
            observes = record.stage is Stage.PREPARED and not record.is_qat
            hooked = hooked_views(self.reference) if HOOKED and not is_compiled else {}
            if is_compiled or not (observes or hooked):
                return super().__call__(*bound)
            # Observers read, compare and write back: threads that calibrate together would lose extremes.
            with _CALIBRATION, calling_hooks(self, hooked) if hooked else nullcontext():
                return super().__call__(*bound)
        except FAILURES as cause:
            error = None if is_of_a_hook(cause) else self._explained(bound, cause)
            if error is None:
                raise
            raise error from cause

    @property
    def is_prepared(self) -> bool:
        return self.record.stage is Stage.PREPARED

    @property
    def __jit_ignored_attributes__(self) -> list[str]:
        """torch.jit.trace would compile what submodules export; the graph it gets calls none of them.

        It asks for this before it looks for attributes: packed weights are there until it calls the
        model, and not for longer, because torch.export cannot look at them.
        """
        vars(self).update(self.packed_weights())
        return ["is_prepared", *self._modules]

    def __dir__(self) -> list[str]:
        names = set(super().__dir__())  # type: ignore[no-untyped-call]
        # What torch.jit was told to ignore it would go through here, and compile.
        if is_asked_by_torch_jit(sys._getframe(1)):
            private = {name for name in vars(self) if name.startswith("_torchq_compat")}
            return sorted(names - set(self._modules) - private)
        return sorted(names - {"torchscript_observes"})

    def on_torchs_operators(self) -> QuantizationGraphModule:
        """Return the model as it runs in a process without this package, which TorchScript is for."""
        return self

    def packed_weights(self) -> Mapping[str, Any]:
        """Name -> packed weights, which torch.jit.trace knows as attributes of the module it traces."""
        return {}

    @torch.jit.export
    def torchscript_observes(self) -> bool:
        """Return False. torch.jit.trace heeds ``__jit_ignored_attributes__`` where something is exported."""
        return False

    def __prepare_scriptable__(self) -> nn.Module:
        """Called by torch.jit.script: a plain module of the same computation that it can compile.

        Raises:
            ExportError: a module or operator that TorchScript has no word for.
        """
        return self._scripted().module()

    def _scripted(self) -> ScriptedGraph:
        scripted: ScriptedGraph = scripted_graph(self)
        return scripted

    def _has_structure(self, args: tuple[Any, ...]) -> bool:
        """Whether ``args`` are tensors, in tuples and lists of the sizes that the example had."""
        info = getattr(self.reference.graph._codegen, "pytree_info", None)
        if info is None:
            return all(isinstance(arg, Tensor) for arg in args)
        known = vars(self).get(STRUCTURE)
        if known is None or known[0] is not info:
            known = vars(self)[STRUCTURE] = (info, structure_of(info.in_spec.child(0)))
        return has_structure(known[1], args)

    def _explained(self, args: tuple[Any, ...], cause: Exception) -> TorchQCompatError | None:
        """Return the error that explains a failed call; None: ``cause`` itself says enough."""
        if isinstance(cause, TorchQCompatError) or torch.compiler.is_compiling():
            return None
        stage = self.record.stage
        if stage is Stage.PREPARED and not self.record.is_qat and isinstance(cause, RuntimeError):
            place = _failing_observer(self, cause)
            if place is not None:
                return _observer_failed(place, cause)
        return explain_failed_call(self.reference, stage.value, args, cause)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """As ``nn.Module.named_children``, for all but the Numeric Suite."""
        refuse_numeric_suite(sys._getframe(1))
        return super().named_children()

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """As ``nn.Module.named_modules``, for all but the Numeric Suite."""
        refuse_numeric_suite(sys._getframe(1))
        modules: Iterator[tuple[str, nn.Module]] = super().named_modules(*args, **kwargs)
        return modules

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As ``nn.Module.state_dict``."""
        if not args and kwargs.get("destination") is None:
            kwargs["destination"] = StateOfCaptured()
            kwargs["destination"]._metadata = OrderedDict()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As ``nn.Module.load_state_dict``; a state that does not fit leaves the model as it was.

        Raises:
            CheckpointError: no state; missing or unexpected keys, or shapes that differ; qparams that are
                none.
        """
        check_state(state_dict, self)
        foreign = sorted(state_dict.keys() - self.state_dict().keys()) if is_fx_state(state_dict) else []
        if foreign:
            loader = fx_state_loader()
            if loader is None:
                raise _is_of_fx(foreign)
            return loader(self, state_dict)
        # torchao's observers keep the very tensors they are given, and two models would then share them.
        own = OrderedDict((k, v.clone() if isinstance(v, Tensor) else v) for k, v in state_dict.items())
        # Without the versions torch takes the state for an old one, and resets the eps of observers.
        own._metadata = getattr(state_dict, "_metadata", self.state_dict()._metadata)  # type: ignore[attr-defined]
        state_dict = own
        before = {name: value.clone() for name, value in self.state_dict().items()}
        adopt_loaded_qparams(self, state_dict)
        try:
            return super().load_state_dict(state_dict, strict=strict, assign=assign)
        except Exception as cause:
            adopt_loaded_qparams(self, before)
            super().load_state_dict(before, strict=False)
            if isinstance(cause, CheckpointError):
                raise
            raise CheckpointError.other_model(str(cause)) from cause

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        with warnings.catch_warnings():
            # Copying the TreeSpecs of an exported graph warns about torch's own pytree code.
            warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
            memo.update(copied_weights(self))
            copied = cast("Self", super().__deepcopy__(memo))
        if copied.record.stage is Stage.PREPARED:
            install_prepared_views(copied, copied.record.modules)
        return copied

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            record = record_of(self) if "meta" in vars(self) else None
            for path in record.steps if record is not None and not name.startswith(("_", "loop")) else ():
                step = self.get_submodule(path)
                if name in step._modules:
                    return step._modules[name]
            if record is None or not record.is_custom_module or name == ROOT:
                raise
            return getattr(self.get_submodule(ROOT), name)

    def _get_name(self) -> str:
        # The first that a tracer asks its root for.
        refuse_fx_tracer(self.record.stage.value)
        return type(self).__name__

    def __reduce__(self) -> Any:
        raise CheckpointError(
            f"a {self.record.stage.value} model cannot be pickled: its graph would lose what it knows "
            "of the float model.",
            hint="save model.state_dict() and load it into a model prepared (and converted) the same way; "
            "to ship a converted model use torch.export.export and torch.export.save.",
        )

    def train(self, mode: bool = True) -> Self:
        """Switch dropout and batch norm, in the graph and in every module it calls."""
        super().train(mode)
        set_training(self, mode)
        return self

    def apply(self, fn: Callable[[nn.Module], Any]) -> Self:
        """As ``nn.Module.apply``. The legacy batch norm switches look for fused QAT module classes, which a
        captured model does not have; they switch the batch norms of the graph."""
        if fn in BATCH_NORM_SWITCHES:
            batch_norm.freeze(self, BATCH_NORM_SWITCHES[fn])
            return self
        return super().apply(fn)


class ConvertedModel(QuantizationGraphModule):
    """What ``convert_fx`` and ``convert_to_reference_fx`` return: a model that is quantized."""

    @property
    def reference(self) -> ConvertedModel:
        """The q-dq graph of ``convert_to_reference_fx``: this model itself, unless it runs on kernels."""
        return self

    def input_qparams(self) -> tuple[QParams | None, ...]:
        """Return the qparams of the integers each flat input is taken as; None where the input is taken as it
        is."""
        raise NotImplementedError

    def output_qparams(self) -> tuple[QParams | None, ...]:
        """Return the qparams of the integers each flat output is returned as; None where it is returned as it
        is."""
        raise NotImplementedError


class ConvertedGraphModule(ConvertedModel):
    """A q-dq graph: its state_dict carries all qparams. Views stand where the float model's modules stood."""

    @classmethod
    def wrap(cls, graph_module: GraphModule, record: ModelRecord, preserved: Mapping[str, Any]) -> Self:
        """See ``QuantizationGraphModule``."""
        wrapped = super().wrap(graph_module, record, preserved)
        install_views(wrapped, record.modules)
        return wrapped

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = super().__deepcopy__(memo)
        install_views(copied, copied.record.modules)
        return copied

    def get_extra_state(self) -> Tensor:
        return qparams_state(self)

    def set_extra_state(self, state: Tensor) -> None:
        """See ``set_qparams_state``."""
        set_qparams_state(self, state)

    def input_qparams(self) -> tuple[QParams | None, ...]:
        """See ``ConvertedModel``."""
        return input_qparams(self, self.record.interface)

    def output_qparams(self) -> tuple[QParams | None, ...]:
        """See ``ConvertedModel``."""
        return output_qparams(self, self.record.interface)

    @property
    def graph(self) -> Graph:
        """The q-dq graph; for torch.export and torch.onnx, which interpret it, one of operators that every
        runtime has."""
        if self._is_asked_for_onnx():
            return graph_for_onnx(self)
        graph = super().graph
        return (with_plain_tables(self, graph) or graph) if _is_exported_alone() else graph

    @graph.setter
    def graph(self, graph: Graph) -> None:
        GraphModule.graph.fset(self, graph)  # type: ignore[attr-defined]

    def recompile(self) -> PythonCode:
        """See ``torch.fx.GraphModule``. Inside of another model torch.export goes through ``forward``."""
        code = super().recompile()
        plain = with_plain_tables(self, self._graph)
        if plain is None:
            return code
        compiled = type(self).forward
        exported = type(GraphModule(self, plain)).forward

        @wraps(compiled)
        def forward(self: ConvertedGraphModule, *args: Any) -> Any:
            return exported(self, *args) if _is_exported_alone() else compiled(self, *args)

        type(self).forward = forward
        return code

    def _is_asked_for_onnx(self) -> bool:
        return is_captured_for_onnx() and record_of(self) is not None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_asked_for_onnx():
            return run_for_onnx(self, self.record.signature.bind(args, kwargs))
        if not self.record.interface.inputs:
            return super().__call__(*args, **kwargs)
        bound = self.record.signature.bind(args, kwargs)
        return super().__call__(*take_integers(bound, self.input_qparams()))

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """See ``QuantizationGraphModule``."""
        keys = super().load_state_dict(state_dict, strict=strict, assign=assign)
        # The cells inside have new qparams now; the boundary around them follows.
        for module in reversed(list(self.modules())):
            if isinstance(module, ConvertedGraphModule):
                refresh_boundaries(module)
        return keys


def _is_exported_alone() -> bool:
    """Whether ``torch.export.export`` is capturing; ``torch.onnx.export`` runs the graph itself."""
    return torch.compiler.is_exporting() and not torch.onnx.is_in_onnx_export()


def preserved_of(model: GraphModule) -> dict[str, Any]:
    """Return the preserved attributes of a model this package made."""
    preserved: dict[str, Any] = model.meta.get(USER_PRESERVED_ATTRIBUTES_KEY, {})
    return dict(preserved)


def _failing_observer(model: nn.Module, cause: BaseException) -> str | None:
    """Return where in ``model`` the innermost observer on the stack of ``cause`` stands."""
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
    """Return the record of a model this package made; None for any other."""
    meta = getattr(model, "meta", None)
    record = meta.get(metadata.RECORD.name) if isinstance(meta, dict) else None
    return record if isinstance(record, ModelRecord) else None


def _is_of_fx(names: list[str]) -> CheckpointError:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return CheckpointError(
        "the state has observers or weights by names that models of torch.ao's FX and eager mode have, and "
        f"this one has not: {', '.join(names[:3])}{more}.",
        hint="if FX saved it, load it with torchq_compat.checkpoints.load_fx_state(prepared, state_dict) "
        "into a "
        "model prepared here, and convert that; this model was left as it was.",
    )


def _old_exporter(stage: str) -> OnnxError:
    return OnnxError(
        f"torch.onnx.export(..., dynamo=False) cannot write a {stage} model: it traces TorchScript, which "
        f"has no "
        "loop of free length and none of the quantize operators.",
        hint="call torchq_compat.to_onnx(converted, example_inputs, path=...), or torch.onnx.export without "
        "dynamo=False.",
    )


def _observer_failed(place: str, cause: BaseException) -> CalibrationError:
    first_line = str(cause).strip().split("\n", 1)[0]
    return CalibrationError(
        f"the observer at {place} failed on this batch: {type(cause).__name__}: {first_line}",
        hint="look for NaN or infinity in the batch with torch.isfinite; earlier batches are kept.",
    )
