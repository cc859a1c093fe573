"""What prepare_fx and convert_fx return: a GraphModule that behaves like the model it came from."""

from __future__ import annotations

import inspect
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Self, cast

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.graph_module import _USER_PRESERVED_ATTRIBUTES_KEY

from torchq_compat.custom_modules.boundary import refresh_boundaries
from torchq_compat.decisions import Decision
from torchq_compat.errors import CalibrationError, CheckpointError, InputError
from torchq_compat.legacy.qconfig_mappings import QConfigRules
from torchq_compat.modes import freeze_batch_norm, set_training
from torchq_compat.observed_graph import observer_label, observer_nodes
from torchq_compat.qparams_state import PerTensorQParamsState
from torchq_compat.quantized_interface import (
    QuantizedInterface,
    input_grids,
    output_grids,
    take_integers,
)
from torchq_compat.specs.grids import Grid

__all__ = [
    "RECORD_KEY",
    "CallSignature",
    "ConvertedGraphModule",
    "ModelRecord",
    "QuantizationGraphModule",
    "Stage",
    "preserved_of",
    "record_of",
]

RECORD_KEY = "torchq_compat"
_CALIBRATION = threading.RLock()
#: Legacy switch -> whether batch norms are frozen.
BATCH_NORM_SWITCHES = {
    torch.ao.nn.intrinsic.qat.freeze_bn_stats: True,
    torch.ao.nn.intrinsic.qat.update_bn_stats: False,
}


class Stage(Enum):
    PREPARED = "prepared"
    CONVERTED = "converted"


@dataclass(frozen=True)
class CallSignature:
    """How the captured model may be called.

    Attributes:
        names: the arguments it takes, in order; None if the float model takes ``*args``.
        defaults: arguments of the float model that the example left at their default.
        fixed_sizes: (argument, dimension) -> size, where capture fixed it.
    """

    names: tuple[str, ...] | None
    defaults: Mapping[str, Any]
    fixed_sizes: Mapping[tuple[str, int], int] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module, args: tuple[Any, ...]) -> CallSignature:
        parameters = list(inspect.signature(model.forward).parameters.values())
        if any(p.kind is p.VAR_POSITIONAL for p in parameters):
            return cls(None, {})
        given, left = parameters[: len(args)], parameters[len(args) :]
        return cls(
            tuple(p.name for p in given),
            {p.name: p.default for p in left if p.kind is not p.VAR_KEYWORD},
        )

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """``args`` and ``kwargs`` as the positional arguments of the captured model.

        Raises:
            InputError: missing or unexpected arguments, or a size that capture fixed.
        """
        if self.names is None or (len(args) == len(self.names) and not kwargs and not self.fixed_sizes):
            return args
        order = (*self.names, *self.defaults)
        if len(args) > len(order):
            raise InputError.call_does_not_match(f"{len(args)} arguments were given", self.names)
        given = dict(zip(order, args, strict=False))
        for name, value in kwargs.items():
            if name in given or name not in order:
                raise InputError.call_does_not_match(f"unexpected or repeated argument {name!r}", self.names)
            given[name] = value
        for name, default in self.defaults.items():
            if name in given and not _same_value(given[name], default):
                raise InputError.call_does_not_match(
                    f"{name!r} was not in example_inputs, so it is fixed to {default!r}", self.names
                )
        missing = [name for name in self.names if name not in given]
        if missing:
            raise InputError.call_does_not_match(f"missing argument {missing[0]!r}", self.names)
        self._check_sizes(given)
        return tuple(given[name] for name in self.names)

    def _check_sizes(self, given: dict[str, Any]) -> None:
        for (name, dimension), size in self.fixed_sizes.items():
            value = given[name]
            if isinstance(value, Tensor) and value.dim() > dimension and value.shape[dimension] != size:
                raise InputError.fixed_size(name, dimension, size, value.shape[dimension])

    def with_sizes_of(self, graph_module: GraphModule, args: tuple[Any, ...]) -> CallSignature:
        """The same, with the sizes that are constants in ``graph_module``."""
        if self.names is None:
            return self
        placeholders = iter(node for node in graph_module.graph.nodes if node.op == "placeholder")
        fixed: dict[tuple[str, int], int] = {}
        for name, arg in zip(self.names, args, strict=True):
            for leaf in pytree.tree_leaves(arg):
                value = next(placeholders).meta.get("val")
                if leaf is arg and isinstance(value, Tensor):
                    fixed |= {(name, i): s for i, s in enumerate(value.shape) if isinstance(s, int)}
        return CallSignature(self.names, self.defaults, fixed)


@dataclass(frozen=True)
class ModelRecord:
    """What the package knows of a model it made; frozen, so that copies of the model share it. It travels in
    ``GraphModule.meta``.

    Attributes:
        rules: the QConfigMapping it was prepared with; None where a torchao Quantizer was given instead.
    """

    stage: Stage
    signature: CallSignature
    decisions: tuple[Decision, ...]
    is_qat: bool
    rules: QConfigRules | None
    interface: QuantizedInterface = field(default_factory=QuantizedInterface)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


class QuantizationGraphModule(GraphModule):
    """A captured model that takes the float model's call forms, ``train()`` and ``eval()``."""

    @classmethod
    def wrap(cls, graph_module: GraphModule, record: ModelRecord, preserved: Mapping[str, Any]) -> Self:
        """``graph_module`` as this class, with the ``preserved`` attributes of the float model."""
        wrapped = cls(graph_module, graph_module.graph)
        wrapped.meta.update(graph_module.meta)
        wrapped.meta[RECORD_KEY] = record
        # GraphModule.__deepcopy__ carries what stands under this key, and only that.
        wrapped.meta[_USER_PRESERVED_ATTRIBUTES_KEY] = dict(preserved)
        for name, value in preserved.items():
            setattr(wrapped, name, value)
        wrapped.train(record.stage is Stage.PREPARED and record.is_qat)
        return wrapped

    @property
    def reference(self) -> QuantizationGraphModule:
        """The graph that the decisions of ``record`` are about: this one, unless it was lowered."""
        return self

    @property
    def lowering(self) -> tuple[Decision, ...]:
        """What was decided after conversion."""
        return ()

    @property
    def record(self) -> ModelRecord:
        record: ModelRecord = self.meta[RECORD_KEY]
        return record

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = self.record.signature.bind(args, kwargs)
        if self.record.stage is Stage.CONVERTED or self.record.is_qat:
            return super().__call__(*bound)
        # Observers read, compare and write back: threads that calibrate together would lose extremes.
        with _CALIBRATION:
            try:
                return super().__call__(*bound)
            except RuntimeError as cause:
                place = _failing_observer(self, cause)
                if place is None:
                    raise
                raise CalibrationError.failed(place, cause) from cause

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As ``nn.Module.load_state_dict``; a state that does not fit leaves the model as it was.

        Raises:
            CheckpointError: missing or unexpected keys, or shapes that differ.
        """
        # torchao's observers keep the very tensors they are given, and two models would then share them.
        state_dict = {k: v.clone() if isinstance(v, Tensor) else v for k, v in state_dict.items()}
        before = {name: value.clone() for name, value in self.state_dict().items()}
        try:
            return super().load_state_dict(state_dict, strict=strict, assign=assign)
        except (RuntimeError, KeyError) as cause:
            super().load_state_dict(before, strict=False)
            raise CheckpointError.other_model(str(cause)) from cause

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        with warnings.catch_warnings():
            # Copying the TreeSpecs of an exported graph warns about torch's own pytree code.
            warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
            return cast("Self", super().__deepcopy__(memo))

    def __reduce__(self) -> Any:
        raise CheckpointError.no_pickle(self.record.stage.value)

    def train(self, mode: bool = True) -> Self:
        """Switch dropout and batch norm, in the graph and in every module it calls."""
        super().train(mode)
        set_training(self, mode)
        return self

    def apply(self, fn: Callable[[nn.Module], Any]) -> Self:
        """As ``nn.Module.apply``. The legacy batch norm switches look for fused QAT module classes, which a
        captured model does not have; they switch the batch norms of the graph."""
        if fn in BATCH_NORM_SWITCHES:
            freeze_batch_norm(self, BATCH_NORM_SWITCHES[fn])
            return self
        return super().apply(fn)


class ConvertedGraphModule(PerTensorQParamsState, QuantizationGraphModule):
    """A q-dq graph: its state_dict carries all qparams."""

    def input_grids(self) -> tuple[Grid | None, ...]:
        """The grid of the integers each flat input is taken as; None where the input is taken as it is."""
        return input_grids(self, self.record.interface)

    def output_grids(self) -> tuple[Grid | None, ...]:
        """The grid of the integers each flat output is returned as; None where it is returned as it is."""
        return output_grids(self, self.record.interface)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.record.interface.inputs:
            return super().__call__(*args, **kwargs)
        bound = self.record.signature.bind(args, kwargs)
        return super().__call__(*take_integers(bound, self.input_grids()))

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


def preserved_of(model: GraphModule) -> dict[str, Any]:
    """The preserved attributes of a model this package made."""
    preserved: dict[str, Any] = model.meta.get(_USER_PRESERVED_ATTRIBUTES_KEY, {})
    return dict(preserved)


def _same_value(value: Any, default: Any) -> bool:
    return value is default or (not isinstance(value, Tensor) and bool(value == default))


def _failing_observer(model: nn.Module, cause: BaseException) -> str | None:
    """Where in ``model`` the innermost observer on the stack of ``cause`` stands."""
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
    """The record of a model this package made; None for any other."""
    meta = getattr(model, "meta", None)
    record = meta.get(RECORD_KEY) if isinstance(meta, dict) else None
    return record if isinstance(record, ModelRecord) else None
