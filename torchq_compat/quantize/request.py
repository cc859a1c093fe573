"""The arguments of ``prepare_fx`` as one frozen value, and the checks of the float model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torchao.quantization.pt2e.observer import HistogramObserver, MovingAverageMinMaxObserver
from torchao.quantization.pt2e.quantizer import QuantizationSpec, Quantizer

from torchq_compat.annotate.quantizers import QuantizerFailedError, UserQuantizer, own_copy
from torchq_compat.annotate.sharing import Output, read_specs
from torchq_compat.capture.checked import decide_values
from torchq_compat.capture.loops.loop_module import LoopedSizes, find_looped_sizes
from torchq_compat.capture.loops.roll import roll_loops
from torchq_compat.capture.loops.step_flow import NotALoopError
from torchq_compat.capture.opaque_stub import StubRegistry
from torchq_compat.capture.sizes.size_reads import ReadSizes
from torchq_compat.capture.torch_export import NO_SIZE, capture
from torchq_compat.capture.trial_runs import FloatRun, Runs, trial_copy
from torchq_compat.errors import InputError, TorchQCompatError
from torchq_compat.model.graph_module import record_of
from torchq_compat.model.other_tools import OBSERVED_KEY
from torchq_compat.model.signature import CallSignature
from torchq_compat.modules.registry import ObserveRequest
from torchq_compat.modules.swap import apply_swaps, decide_swaps
from torchq_compat.quantize.distributed.wrappers import check_not_wrapped
from torchq_compat.read.backend_configs import BackendTable
from torchq_compat.read.custom_configs import PrepareSettings
from torchq_compat.read.qconfig_mappings import QConfigRules, read_qconfig_mapping
from torchq_compat.read.qspecs import SpecObserverConstructor, make_observer
from torchq_compat.support import torch_ao
from torchq_compat.support.decisions import Action, Decision
from torchq_compat.support.dtypes import is_integer
from torchq_compat.support.graph_nodes import is_inside, module_path_of

# The arguments of ``prepare_fx`` or ``prepare_qat_fx`` as one frozen value.


@dataclass(frozen=True)
class PrepareRequest:
    """The arguments of ``prepare``, read and checked.

    Attributes:
        rules: the QConfigMapping; if ``quantizer`` is given, the default one, for custom modules alone.
        is_step: whether the model is the step of a loop, prepared by the rules of the model around it.
        first_inputs, longer_inputs: the arguments of its first step, and of its last at longer sizes.
        states: how many of its first inputs are what the step before it returned first.
        unrolled_because: why loops over time stay as they are written; empty if they may be rolled.
        untraced_because: why modules of torch.nn that FX does not trace are one float call each; empty if
            they are traced.
        has_two_samples: whether each single sample of the example was doubled.
        fuse_as_fx: whether only the batch norms that FX folds are folded.
        quantizer: annotates everything but custom modules, in place of ``rules`` and ``backend``.
        fixed_because: why every size is that of the example; empty if sizes may be free.
    """

    rules: QConfigRules
    quantizer: Quantizer | None
    example_inputs: tuple[Any, ...]
    settings: PrepareSettings
    backend: BackendTable
    dynamic_shapes: Any
    is_qat: bool
    is_step: bool = False
    first_inputs: tuple[Any, ...] = ()
    longer_inputs: Mapping[str, tuple[tuple[Any, ...], ...]] = field(default_factory=dict)
    states: int = 0
    unrolled_because: str = ""
    untraced_because: str = ""
    has_two_samples: bool = False
    fuse_as_fx: bool = False
    fixed_because: str = ""

    def inside(self, inner: ObserveRequest) -> PrepareRequest:
        """Return the request for preparing a standalone module or the step of a loop."""
        if inner.example_inputs is not None:
            settings = replace(
                self.settings,
                input_quantized_indexes=(),
                output_quantized_indexes=(),
                preserved_attributes=(),
            )
            return replace(
                self,
                example_inputs=inner.example_inputs,
                settings=settings,
                dynamic_shapes=NO_SIZE if self.fixed_because else None,
                is_step=True,
                first_inputs=inner.first_inputs,
                longer_inputs=inner.longer_inputs,
                states=inner.states,
            )
        standalone = inner.standalone
        assert standalone is not None
        return PrepareRequest(
            rules=standalone.rules or QConfigRules.of_global(inner.qconfig),
            quantizer=self.quantizer if standalone.rules is None else None,
            example_inputs=standalone.example_inputs,
            settings=standalone.settings,
            backend=standalone.backend or self.backend,
            dynamic_shapes=NO_SIZE if self.fixed_because else None,
            is_qat=self.is_qat,
            fuse_as_fx=self.fuse_as_fx,
            fixed_because=self.fixed_because,
        )


# Checks of the model given to prepare, which must be float and not quantized in any part.


#: Classes of ``torch.ao.nn.quantized`` that are float.
FUNCTIONALS = (torch_ao.FloatFunctional, torch_ao.FXFloatFunctional)


def check_float_model(model: nn.Module) -> None:
    """Raise if ``model`` is not a float model.

    Raises:
        InputError: ``model`` is not an nn.Module, or it was prepared or converted, here or by FX, or one of
            its submodules was prepared.
    """
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise InputError.of("TQ901.class_for_model", model=model.__name__)
    if not isinstance(model, nn.Module):
        raise InputError.of("TQ901.no_module", model=model)
    check_not_wrapped(model)
    converted: list[str] = []
    for path, module in model.named_modules():
        stage = _stage_of(module)
        if stage == "converted" and path:
            converted.append(f"{path}.")  # One float call, with all that is in it.
        elif stage is not None and not path.startswith(tuple(converted)):
            where = f"the module at {path!r}" if path else "the model"
            raise InputError.of("TQ901.quantized_already", where=where, stage=stage)


def is_converted(module: nn.Module) -> bool:
    """Return whether ``module`` is a converted model, of this package or of FX."""
    return _stage_of(module) == "converted"


def signature_of(model: nn.Module, args: tuple[Any, ...]) -> CallSignature:
    """Return the signature of the call of ``model`` with ``args``.

    Raises:
        InputError: ``args`` do not fit its ``forward``.
    """
    try:
        return CallSignature.of(model, args)
    except ValueError as cause:
        raise InputError.does_not_fit(type(model).__name__, cause) from cause


def _stage_of(module: nn.Module) -> str | None:
    """Return the stage that ``module`` has been through, here or in FX, or None if it is float."""
    if (record := record_of(module)) is not None:
        return record.stage.value
    if not isinstance(module, GraphModule):
        return None
    if OBSERVED_KEY in module.meta:
        return "prepared"
    kinds = {type(inner).__module__ for inner in module.modules() if not isinstance(inner, FUNCTIONALS)}
    is_converted = isinstance(module, torch_ao.QuantizedGraphModule) or any(
        kind.startswith("torch.ao.nn.quantized") for kind in kinds
    )
    return "converted" if is_converted else None


# Rolls loops over time that the model writes in Python, before capture, or reports why it did not.


#: How many lines of loops a decision names.
NAMED_LINES = 3


@dataclass(frozen=True)
class WithLoops:
    """A float model whose loops over time are modules if they could be rolled.

    Attributes:
        model: the model to capture; a new one if loops were rolled.
        steps: paths in ``model`` of the submodules that compute one step.
        decisions: the decisions about the loops.
        example: the run of ``model`` on the example inputs, if there was one.
        read: what Python decided by sizes before loops were rolled.
    """

    model: nn.Module
    steps: tuple[str, ...] = ()
    decisions: tuple[Decision, ...] = ()
    example: FloatRun | None = None
    read: ReadSizes = field(default_factory=ReadSizes)


def with_rolled_loops(working: nn.Module, signature: CallSignature, request: PrepareRequest) -> WithLoops:
    """Return ``working`` with its loops over time as modules, or as it is if they cannot be rolled."""
    if request.is_step or request.dynamic_shapes is not None:
        return WithLoops(working)
    args = request.example_inputs
    inputs: Mapping[str, Any] = signature.labelled(args)
    runs = Runs(trial_copy(working), StubRegistry(), {}, example=args)
    looped, example = find_looped_sizes(runs, args, inputs)
    if looped is None:
        return WithLoops(working, example=example)
    if request.unrolled_because:
        return _as_written(working, looped, example, request.unrolled_because)
    swaps, _ = decide_swaps(
        working, request.rules, request.settings, request.backend, request.untraced_because
    )

    def put_stubs(model: nn.Module, stubs: StubRegistry) -> Mapping[str, nn.Module]:
        apply_swaps(model, swaps, stubs)
        for swap in swaps:
            if swap.paths[0] in looped.repeated:
                swap.handler.give_states(model.get_submodule(swap.paths[0]))
        return {swap.paths[0]: swap.module for swap in swaps}

    try:
        rolled = roll_loops(working, runs, example, inputs, looped, put_stubs, is_trained=request.is_qat)
    except NotALoopError as reason:
        return _as_written(working, looped, example, str(reason))
    except Exception as cause:
        # A repetition in the graph may have a form that the rolling does not foresee; the unrolled model can
        # still be captured.
        return _as_written(working, looped, example, f"{type(cause).__name__}: {cause}")
    steps = tuple(f"{path}.step" for path in rolled.loops)
    return WithLoops(rolled.model, steps, tuple(decide_values(rolled.decided)), example, rolled.read)


def _as_written(working: nn.Module, looped: LoopedSizes, example: FloatRun, reason: str) -> WithLoops:
    where = ", ".join(f"{label}.size({index})" for group in looped.groups for label, index in group[:1])
    at = f" at {', '.join(looped.lines[:NAMED_LINES])}" if looped.lines else ""
    first_line = (reason.strip().splitlines() or [""])[0]
    decided = f"the loop over {where}{at} is written out for the length of the example: {first_line}"
    decisions = (Decision("", "loop over time", Action.FIXED, decided),)
    return WithLoops(working, decisions=decisions, example=example)


# The QConfigs of custom modules beside a user's Quantizer, which annotates everything else.


#: The engine whose default QConfig has the whole range of 8 bits.
WHOLE_RANGE = "qnnpack"
#: The width of the probe's layers, which backends with vector units accept.
WIDTH = 16


def rules_beside(
    quantizer: Quantizer, model: nn.Module, settings: PrepareSettings, given: Any, *, is_qat: bool
) -> QConfigRules:
    """Return the QConfigs of the custom modules of ``model``.

    They are the ``qconfig`` of the module or of the nearest one around it, as where torch.ao propagates them;
    or those ``given``; or what ``quantizer`` annotates a linear layer in the module's place with; or the
    default one of the whole range.

    Args:
        given: a QConfig for all, a QConfigMapping or its dict form; or None.

    Raises:
        ConfigError: a QConfig cannot be read.
    """
    default: torch_ao.QConfig = (
        torch_ao.get_default_qat_qconfig if is_qat else torch_ao.get_default_qconfig
    )(WHOLE_RANGE)  # type: ignore[no-untyped-call]
    is_mapping = given is not None and not isinstance(given, torch_ao.QConfig)
    rules = read_qconfig_mapping(given) if is_mapping else QConfigRules.of_global(given or default)
    own = {path: vars(m)["qconfig"] for path, m in model.named_modules() if "qconfig" in vars(m)}
    mapped = {item for classes in settings.float_to_observed.values() for item in classes}
    paths = [
        path
        for path, module in model.named_modules()
        if mapped.intersection(type(module).__mro__) and not any(is_inside(path, name) for name in own)
    ]
    name = type(quantizer).__name__
    specs = _specs_of_linears(quantizer, paths) if paths and given is None else {}
    mapping = torch_ao.QConfigMapping().set_global(own.get("", rules.global_qconfig))
    for path, qconfig in own.items():
        mapping.set_module_name(path, qconfig)
    for path, (activation, weight) in specs.items():
        mapping.set_module_name(
            path,
            torch_ao.QConfig(  # type: ignore[no-untyped-call]
                activation=default.activation if activation is None else _over_time(activation, name),
                weight=default.weight if weight is None else SpecObserverConstructor(weight, name),
            ),
        )
    checked = read_qconfig_mapping(mapping)
    names = {path: qconfig for path, qconfig in checked.module_names.items() if path}
    of_all = "the default with the whole range" if given is None else "custom_module_qconfig"
    sources = {"": of_all} | dict.fromkeys(specs, name) | dict.fromkeys(own, "module.qconfig")
    return replace(
        rules,
        global_qconfig=checked.global_qconfig,
        module_names=MappingProxyType({**rules.module_names, **names}),
        sources=MappingProxyType(sources),
    )


def _over_time(spec: QuantizationSpec, setting: str) -> SpecObserverConstructor:
    """Return the constructor of ``spec``; of a histogram in place of a moving average, which over the steps
    of a sequence stays near the range of the first ones."""
    result = make_observer(spec)
    if isinstance(result, MovingAverageMinMaxObserver):
        spec = replace(spec, observer_or_fake_quant_ctr=HistogramObserver.with_args(eps=float(result.eps)))
    return SpecObserverConstructor(spec, setting)


class _Probe(nn.Module):
    """A model with a linear layer at each of ``paths``."""

    def __init__(self, paths: list[str]) -> None:
        super().__init__()
        self.paths = paths
        for path in paths:
            parent: nn.Module = self
            *outer, name = path.split(".")
            for item in outer:
                if item not in dict(parent.named_children()):
                    parent.add_module(item, nn.Module())
                parent = parent.get_submodule(item)
            parent.add_module(name, nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> list[Tensor]:
        return [self.get_submodule(path)(x) for path in self.paths]


def _specs_of_linears(
    quantizer: Quantizer, paths: list[str]
) -> Mapping[str, tuple[QuantizationSpec | None, QuantizationSpec | None]]:
    """Return the specs of activation and weight that ``quantizer`` gives a linear layer at each of ``paths``;
    none where it annotates nothing or fails."""
    graph_module, _ = capture(_Probe(paths).eval(), (torch.zeros(WIDTH, WIDTH),))
    with suppress(QuantizerFailedError, TorchQCompatError):
        annotated = UserQuantizer(own_copy(quantizer), {}, graph_module).ask(graph_module)
        specs = list(_specs_by_path(annotated))
        return {
            path: (
                _most_common(spec for at, is_weight, spec in specs if at == path and not is_weight),
                _most_common(spec for at, is_weight, spec in specs if at == path and is_weight),
            )
            for path in paths
            if any(at == path for at, _, _ in specs)
        }
    return {}


def _specs_by_path(annotated: GraphModule) -> Iterator[tuple[str, bool, QuantizationSpec]]:
    """Yield each integer spec with the path of its module and whether it is of a weight."""
    for point, spec in read_specs(annotated.graph):
        if not isinstance(spec, QuantizationSpec) or not is_integer(spec.dtype):
            continue
        source, reader = point if isinstance(point, tuple) else (point, None)
        node = source.node if isinstance(source, Output) else source
        is_parameter = node.op == "get_attr"
        if is_parameter and node.meta["val"].dim() < 2:
            continue  # A bias.
        yield module_path_of(reader or node).partition("@")[0], is_parameter, spec


def _most_common(specs: Iterator[QuantizationSpec]) -> QuantizationSpec | None:
    counted = Counter(specs).most_common(1)
    return counted[0][0] if counted else None
