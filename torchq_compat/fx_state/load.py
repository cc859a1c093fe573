"""Loads a state dict of FX into a prepared model: everything is matched first, then all or nothing is
written."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from torchq_compat.capture.opaque_calls import OpaqueModule, opaque_modules
from torchq_compat.errors import CheckpointError
from torchq_compat.fx_state.graph_names import PARAMETRIZATIONS, required_by_graph
from torchq_compat.fx_state.numbered import FoldedBatchNorm, Required, RequiredObserver, RequiredTensor
from torchq_compat.fx_state.states import Entry, FxState, FxWeight
from torchq_compat.model.graph_module import QuantizationGraphModule, record_of
from torchq_compat.model.state import is_no_range
from torchq_compat.read.observers import WeightObserver
from torchq_compat.read.qconfig_mappings import QConfigRules
from torchq_compat.read.qparams import hold_qparams, release_qparams
from torchq_compat.read.torch_ao_classes import has_fixed_qparams
from torchq_compat.support.argument_checks import listed
from torchq_compat.support.graph_nodes import attribute_of
from torchq_compat.support.torch_ao import FakeQuantizeBase, ObserverBase, fused_module
from torchq_compat.support.user_warnings import warn_user

#: Buffers that only our observers have: counts of the values that they saw and that their range cut off.
COUNTS = ("seen", "saturated")
#: A buffer that observers saved by older versions of torch do not have.
EPS = "eps"
#: The attribute of a float module that has the qparams with which its weight was loaded.
WEIGHT_QPARAMS = "loaded_weight_qparams"
#: Returns the handler of a custom module.
HandlerOf = Callable[[nn.Module], Any]


def load_state(prepared: QuantizationGraphModule, given: Mapping[str, Any], handler_of: HandlerOf) -> None:
    """Load ``given``, as a prepared or converted model of FX saved it, into ``prepared``.

    Raises:
        CheckpointError: see ``torchq_compat.checkpoints.load_fx_state``; ``prepared`` is unchanged.
    """
    _refuse_wrapped(prepared, given)
    state = FxState(given)
    expected = required_by_model(prepared, state, prepared.record.rules, handler_of=handler_of)
    plan = _Plan(prepared, state, expected)
    plan.write()
    if plan.dropped:
        warn_user("TQ501", count=len(plan.dropped), values=listed(plan.dropped))
    shared = [name for name, paths in plan.given_by.items() if name.endswith(".scale") and len(paths) > 1]
    if shared:
        warn_user("TQ502", modules=listed(shared))
    if plan.trained_float:
        warn_user("TQ431", observers=listed(list(plan.trained_float.values())))


def load_module_state(prepared: nn.Module, given: Mapping[str, Any], handler_of: HandlerOf) -> None:
    """Load ``given``, as a model of torch.ao's eager mode saved it, into a ``prepared`` model of modules.

    Raises:
        CheckpointError: as ``load_state``; ``prepared`` is unchanged.
    """
    _refuse_wrapped(prepared, given)
    state = FxState(given)
    plan = _Plan(prepared, state, required_by_modules(prepared, state, handler_of))
    plan.write()
    for path, module in prepared.named_modules():
        vars(module).pop(WEIGHT_QPARAMS, None)
        if (weight := plan.weights.get(f"{path}.{WEIGHT_QPARAMS}")) is not None:
            vars(module)[WEIGHT_QPARAMS] = weight.scale, weight.zero_point


def required_by_modules(model: nn.Module, state: FxState, handler_of: HandlerOf) -> Required:
    """Return what a prepared model of modules wants: torch.ao has the same names, but for custom modules."""
    expected, read = Required(), set[str]()
    for path, module in model.named_modules():
        if any(path.startswith(f"{above}.") for above in read):
            continue
        owner, _, name = path.rpartition(".")
        handler = handler_of(module)
        if handler is not None and isinstance(module, OpaqueModule):
            read.add(path)
            expected += handler.required_of_fx(module, state, path, required_by_model).below(path)
        elif isinstance(module, (ObserverBase, FakeQuantizeBase)):
            read.add(path)
            is_weight = name == "weight_fake_quant"
            scales = () if is_weight else (f"{owner}.scale",)
            expected += Required(observers=(RequiredObserver(path, (path,), scales, is_weight=is_weight),))
        elif isinstance(norm := getattr(module, "bn", None), nn.modules.batchnorm._BatchNorm):
            bias = f"{path}.bias"
            own_bias = bias if getattr(module, "bias", None) is not None else None
            names = {role: f"{path}.bn.{role}" for role in ("weight", "bias", "running_mean", "running_var")}
            expected += Required(folded=(FoldedBatchNorm(names, norm.eps, (bias,), own_bias),))
    own = (name for name in model.state_dict() if not any(name.startswith(f"{above}.") for above in read))
    return expected + Required(tuple(_required_of_module(model, name) for name in own))


def _required_of_module(model: nn.Module, name: str) -> RequiredTensor:
    path, _, last = name.rpartition(".")
    above, _, child = path.rpartition(".")
    # A fused module is converted to one at its own path.
    is_fused = child == "0" and bool(above) and isinstance(model.get_submodule(above), fused_module)
    names = (name, f"{above}.{last}") if is_fused else (name,)
    place = above if is_fused else path
    trained = hasattr(model.get_submodule(path), "weight_fake_quant")
    observer = f"{place}.{'weight_fake_quant' if trained else WEIGHT_QPARAMS}"
    observers = (observer,) if last == "weight" else ()
    return RequiredTensor(name, names, observers, is_optional=last == "num_batches_tracked")


def translated_state(module: nn.Module, given: Mapping[str, Any], handler: Any, at: str) -> dict[str, Tensor]:
    """Return the state ``given`` of a custom module that torch.ao prepared, in the names of ``module``, which
    stands ``at`` a path.

    Raises:
        CheckpointError: an entry has no place, or ``given`` is of a converted module.
    """
    state = FxState({f"{at}.{name}": value for name, value in given.items()})
    plan = _Plan(module, state, handler.required_of_fx(module, state, at, required_by_model))
    if state.is_converted:
        raise CheckpointError.of("TQ960.converted_state")
    observers = ((f"{path}.{key}", value) for path, of in plan.observers.items() for key, value in of.items())
    return {**module.state_dict(), **plan.tensors, **dict(observers)}


def _refuse_wrapped(prepared: nn.Module, given: Mapping[str, Any]) -> None:
    """Raise for a checkpoint that contains the state, and for the state of a wrapper such as DataParallel."""
    states = [name for name, value in given.items() if isinstance(value, Mapping) and _has_tensors(value)]
    if states and not _has_tensors(given):
        raise CheckpointError.of("TQ960.nested_state", states=states)
    prefix = next(iter(given), "").partition(".")[0] + "."
    is_ours = any(name.startswith(prefix) for name in prepared.state_dict())
    if given and not is_ours and all(name.startswith(prefix) for name in given):
        raise CheckpointError.of("TQ960.prefix", prefix=prefix)


def _has_tensors(state: Mapping[Any, Any]) -> bool:
    return any(isinstance(value, Tensor) for value in state.values())


def required_by_model(
    graph_module: GraphModule,
    state: FxState,
    rules: QConfigRules | None,
    prefix: str = "",
    *,
    handler_of: HandlerOf,
) -> Required:
    """Return what a prepared model wants, with its custom modules, whose handler ``handler_of`` returns."""
    expected = required_by_graph(graph_module, state, rules, prefix)
    for path, leaf in opaque_modules(graph_module).items():
        if (handler := handler_of(leaf)) is not None:
            inside = handler.required_of_fx(
                leaf, state, f"{prefix}{path}", partial(required_by_model, handler_of=handler_of)
            )
            expected += inside.below(path)
    return expected


class _Plan:
    """What is written into a model: every entry of the state and every wanted value is matched first.

    Raises:
        CheckpointError: an entry or a wanted value has no match, or does not fit.
    """

    def __init__(self, prepared: nn.Module, state: FxState, expected: Required) -> None:
        self.prepared = prepared
        self.state = state
        self.required = expected
        self.own = prepared.state_dict()
        #: The values to write: tensors by name, states of observers and qparams by path.
        self.tensors: dict[str, Tensor] = {}
        self.observers: dict[str, dict[str, Tensor]] = {}
        self.qparams: dict[str, tuple[Tensor, Tensor]] = {}
        self.trained_float: dict[str, str] = {}
        self.dropped: list[str] = []
        self.missing: list[str] = []
        self.weights: dict[str, FxWeight] = {}
        #: Our name of a function's weight -> FX's name of its packed weight.
        self.packed: dict[str, str] = {}
        #: FX's name of a scale -> the paths of our observers that it is loaded into.
        self.given_by: dict[str, list[str]] = {}
        functional = iter(list(state.functional_weights.items()))
        # Weights come first: the bias of a function is packed with its weight.
        for tensor in sorted(expected.tensors, key=lambda tensor: tensor.packed_with is not None):
            self._plan_tensor(tensor, functional)
        for batch_norm in expected.folded if state.is_converted else ():
            self._dissolve(batch_norm)
        lacks_weights = bool(self.missing)
        for observer in expected.observers:
            self._plan_observer(observer)
        self._drop_known()
        self._refuse_remaining(lacks_weights)

    def _plan_tensor(self, required: RequiredTensor, functional: Iterator[tuple[str, Entry]]) -> None:
        result = self._take_tied(required)
        if result is None and required.is_functional:
            result = next((item for item in functional if isinstance(item[1].value, FxWeight)), None)
            if result is not None:
                self.state.forgive(result[0])
                self.packed[required.name] = result[0]
        if result is None and required.packed_with in self.packed:
            name = f"{self.packed[required.packed_with]}:bias"
            entry = self.state.functional_weights.get(name)
            self.state.forgive(name)
            result = None if entry is None else (name, entry)
        if result is None:
            if not required.is_optional:
                self.missing.append(required.names[0])
            return
        name, entry = result
        value = entry.value
        if isinstance(value, FxWeight):
            self.weights |= dict.fromkeys(required.observers, value)
            value = value.values
            if required.is_functional and value.dim() == self.own[required.name].dim() + 1:
                # FX packs a convolution over one dimension as one over two.
                value = value.squeeze(2)
        expected = self.own[required.name]
        if value.shape != expected.shape:
            raise CheckpointError.other_model(
                f"{name} is {tuple(value.shape)}, and {required.name} of this model {tuple(expected.shape)}."
            )
        if value.is_meta:
            raise CheckpointError.bad_value(name, "is a meta tensor, which has no values")
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise CheckpointError.bad_value(name, "holds NaN or infinity")
        if not torch.can_cast(value.dtype, expected.dtype):
            raise CheckpointError.bad_value(name, f"is {value.dtype} where the model has {expected.dtype}")
        self.tensors[required.name] = value

    def _take_tied(self, required: RequiredTensor) -> tuple[str, Entry] | None:
        """Take every entry of the state for one tensor, and return one of them: each of FX's modules that
        shares the tensor saves its own, quantized or not."""
        result = [taken for name in required.names if (taken := self.state.take((name,))) is not None]
        # A float entry is preferred: it is the value before quantization.
        result.sort(key=lambda taken: isinstance(taken[1].value, FxWeight))
        for name, entry in result[1:]:
            first, other = result[0][1].value, entry.value
            if isinstance(first, FxWeight) or isinstance(other, Tensor):
                a, b = (item.values if isinstance(item, FxWeight) else item for item in (first, other))
                if a.shape != b.shape or not torch.equal(a.to(b.dtype), b):
                    raise CheckpointError.other_model(
                        f"{result[0][0]} and {name} differ, and are one tensor, {required.name}, in "
                        "this model."
                    )
        return result[0] if result else None

    def _dissolve(self, batch_norm: FoldedBatchNorm) -> None:
        """Make the batch norm an identity plus the loaded bias: a converted state has it in the weight."""
        names = batch_norm.names
        theirs = {t.names[0] for t in self.required.tensors if t.name in names.values()}
        self.missing = [item for item in self.missing if item not in theirs]
        bias = self.state.take(batch_norm.biases)
        variance = torch.ones_like(self.own[names["running_var"]])
        shift = mean = torch.zeros_like(variance)
        if batch_norm.own_bias is None and bias is not None and isinstance(bias[1].value, Tensor):
            shift = bias[1].value
        # The weight is scaled by weight / sqrt(variance + eps), which is 1, bit for bit.
        weight = torch.sqrt(variance + batch_norm.eps)
        values = {"weight": weight, "bias": shift, "running_mean": mean, "running_var": variance}
        self.tensors |= {names[role]: value for role, value in values.items()}

    def _plan_observer(self, required: RequiredObserver) -> None:
        observer = self.prepared.get_submodule(required.path)
        if self.state.is_converted:
            self._plan_qparams(required, observer)
            return
        result = {prefix: under for prefix in required.prefixes if (under := self.state.take_under(prefix))}
        own = _names_of(observer)
        if required.is_weight and isinstance(observer, WeightObserver):
            return  # It observes the weight at convert, as FX does.
        if not own:
            return
        if not result:
            if required.trained_float:
                self.trained_float[required.path] = required.prefixes[0]
            elif not has_fixed_qparams(observer):
                self.missing.append(required.prefixes[0] if required.prefixes else required.path)
            return
        prefix = self._most_common(list(result))
        self.observers[required.path] = self._checked(prefix, required.path, result[prefix])

    def _most_common(self, names: list[str]) -> str:
        """Return the observer or scale whose content most of ``names`` have; record those that differ as
        dropped. ``names`` belong to ops that share one observer here."""
        prints = {name: self.state.fingerprint(name) for name in names}
        common = Counter(prints.values()).most_common(1)[0][0]
        self.dropped += [name for name in names if prints[name] != common]
        return next(name for name in names if prints[name] == common)

    def _checked(self, name: str, path: str, given: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return ``given``, the state of the observer ``name`` of FX, for the one at ``path``."""
        observer = self.prepared.get_submodule(path)
        own = _names_of(observer)
        given = _current_observer(given, own, observer)
        learned = dict(getattr(observer, "legacy", observer).named_parameters())
        lacking = sorted(item for item in own - given.keys() if not item.endswith(EPS))
        if has_fixed_qparams(observer):
            return {}  # Those of FX are equal, or of the value before, which a sum or product shares in FX.
        unknown = sorted(given.keys() - own)
        fixed = {item.rpartition(".")[2]: given[item] for item in unknown}
        if lacking and fixed.keys() == {"scale", "zero_point"}:
            # FX gives it those of the first value of a join.
            self.qparams[path] = fixed["scale"], fixed["zero_point"]
            return {}
        if lacking or unknown:
            raise CheckpointError.other_model(
                f"{name} is of another class of observer than {type(observer).__name__} at "
                f"{path}: it has {', '.join(unknown) or 'nothing more'} and lacks "
                f"{', '.join(lacking) or 'nothing'}."
            )
        for key, value in given.items():
            if value.is_complex() or (value.is_floating_point() and value.element_size() == 1):
                raise CheckpointError.bad_value(f"{name}.{key}", f"is {value.dtype}, and no range or scale")
            if key.endswith(("histogram", "scale")) and not bool(value.isfinite().all()):
                raise CheckpointError.bad_value(f"{name}.{key}", "holds NaN or infinity")
            if key.endswith(("min_val", "max_val")) and bool(value.isnan().any()):
                raise CheckpointError.bad_value(f"{name}.{key}", "holds NaN")
            other = key.replace("min_val", "max_val")
            if other != key and value.shape == given[other].shape and is_no_range(value, given[other]):
                problem = f"is larger than {name}.{other}, or infinite"
                raise CheckpointError.bad_value(f"{name}.{key}", problem)
            # A learned scale may have any value after a training step; the next call clamps it.
            if key.endswith("scale") and key not in learned and not bool((value > 0).all()):
                raise CheckpointError.bad_value(f"{name}.{key}", "holds a scale that is no positive number")
            if key.endswith("histogram") and value.shape != observer.get_buffer(key).shape:
                raise CheckpointError.other_model(
                    f"{name}.{key} has {value.numel()} bins, and this model "
                    f"{observer.get_buffer(key).numel()}."
                )
        return given

    def _plan_qparams(self, required: RequiredObserver, observer: nn.Module) -> None:
        if (weight := self.weights.get(required.path)) is not None:
            if weight.scale is not None and weight.zero_point is not None:
                self.qparams[required.path] = weight.scale, weight.zero_point
            return
        result = self._qparams_of(required.scales)
        if not result and self.state.is_lowered and (handed_on := self._qparams_of(required.handed_on)):
            name, values = next(iter(handed_on.items()))
            self._set_qparams(required, name, values)
            return
        if not result:
            if required.kernel is not None and self.state.is_lowered:
                fixed_scale, fixed_zero_point = required.kernel
                self.qparams[required.path] = torch.tensor([fixed_scale]), torch.tensor([fixed_zero_point])
            # FX's kernels know fixed qparams; dynamic activations and float weights have none.
            elif not (has_fixed_qparams(observer) or not observer.state_dict() or required.is_weight):
                self.missing.append(required.scales[0] if required.scales else required.path)
            return
        name = next(iter(result)) if required.is_weight else self._most_common(list(result))
        self.given_by.setdefault(name, []).append(required.path)
        self._set_qparams(required, name, result[name])

    def _qparams_of(self, scale_names: Iterable[str]) -> dict[str, tuple[Any, Any]]:
        result = {}
        for scale_name in scale_names:
            scale, zero_point = (self.state.take((name,)) for name in self.state.qparams(scale_name))
            if scale is not None and zero_point is not None:
                result[scale_name] = scale[1].value, zero_point[1].value
        return result

    def _set_qparams(self, required: RequiredObserver, name: str, qparams: tuple[Any, Any]) -> None:
        observer: Any = self.prepared.get_submodule(required.path)
        scale, zero_point = qparams
        if scale.numel() > 1 and not hasattr(observer, "ch_axis"):
            raise CheckpointError.other_model(
                f"{name} is of {scale.numel()} channels, and {required.path} of this model has none."
            )
        if not bool((scale.isfinite() & (scale > 0)).all()):
            raise CheckpointError.bad_value(name, "holds a scale that is no positive number")
        self.qparams[required.path] = qparams
        if not required.is_weight:
            return
        # A function's weight is floats in front of a quantize node in a reference model.
        name = next(tensor.name for tensor in self.required.tensors if required.path in tensor.observers)
        if (weight := self.tensors.get(name)) is not None:
            axis = int(getattr(observer, "ch_axis", 0))
            shape = [-1 if d == axis and scale.numel() > 1 else 1 for d in range(weight.dim())]
            s, z = scale.reshape(shape), zero_point.reshape(shape)
            low, high = int(observer.quant_min), int(observer.quant_max)
            self.tensors[name] = ((torch.round(weight / s) + z).clamp(low, high) - z) * s

    def _drop_known(self) -> None:
        for prefix in (*self.required.only_fx, *self.required.unused):
            if self.state.is_converted:
                taken = [name for name in self.state.qparams(prefix) if self.state.take((name,))]
            else:
                taken = [f"{prefix}.{name}" for name in self.state.take_under(prefix)]
            if taken and prefix in self.required.only_fx:
                self.dropped.append(prefix)
        for name, entry in dict(self.state.untaken()).items():
            path, _, last = name.rpartition(".")
            is_qparam = last in ("scale", "zero_point")
            if last == "num_batches_tracked" or (is_qparam and _is_stand_in(path, self.state)):
                # The counter of a batch norm that is not trained, or the attributes that a dynamically
                # quantized linear inherits from the static one, though it has no output qparams.
                self.state.forgive(name)
            elif ".weight_fake_quant." in f".{name}" and not self._observes(name):
                # FX prepares modules for training by their QConfig, and converts by the backend.
                self.state.forgive(name)
            elif isinstance(entry.value, Tensor) and last == "bias" and not bool(entry.value.any()):
                # FX gives packed linears and folded convolutions a bias of zeros.
                self.state.forgive(name)

    def _observes(self, name: str) -> bool:
        """Return whether this model quantizes the weight of ``name``, an entry of one of FX's weight
        fake-quantizes."""
        weight = name.partition("weight_fake_quant.")[0] + "weight"
        return any(weight in tensor.names and tensor.observers for tensor in self.required.tensors)

    def _refuse_remaining(self, lacks_weights: bool) -> None:
        left = self.state.left()
        names = (*self.missing, *left)
        if paths := sorted({name.split(PARAMETRIZATIONS)[0] for name in names if PARAMETRIZATIONS in name}):
            why = f"a parametrization computes a tensor of {listed(paths)}, on one side alone"
            raise _incomplete(f"{why}.", [], "TQ960.computed_weights")
        record = record_of(self.prepared)
        apart = record is not None and any(decision.code == "TQ584" for decision in record.decisions)
        key = "TQ960.folded_here" if apart else "TQ960.does_not_fit"
        if self.missing:
            if self.state.is_lowered and not lacks_weights:
                why = "FX's lowered ELU, PReLU, Sigmoid and Softmax keep their qparams outside of the state"
                self.required = replace(self.required, problems=(*self.required.problems, why))
            problems = "".join(f"; {problem}" for problem in self.required.problems)
            raise _incomplete(f"it lacks {listed(self.missing)}{problems}.", left, key)
        if self.required.problems:
            raise _incomplete(f"{'; '.join(self.required.problems)}.", left, key)
        if left:
            raise _incomplete(f"this model has no place for {listed(left)}.", [], key)

    def write(self) -> None:
        """Write the values; if that fails, the model is as it was."""
        prepared = self.prepared
        before = {name: value.clone() for name, value in self.own.items() if isinstance(value, Tensor)}
        own = dict(prepared.named_parameters(remove_duplicate=False)) | dict(
            prepared.named_buffers(remove_duplicate=False)
        )
        try:
            for module in prepared.modules():
                release_qparams(module)
            with torch.no_grad():
                for name, value in self.tensors.items():
                    own[name].copy_(value)
            for path, given in self.observers.items():
                _load_observer(prepared.get_submodule(path), given)
            if isinstance(prepared, GraphModule):
                for node in prepared.graph.nodes:
                    if node.op == "call_module" and node.target in self.trained_float:
                        _observe_anew(prepared, node)
            for path, (scale, zero_point) in self.qparams.items():
                _hold(prepared.get_submodule(path), scale, zero_point)
        except Exception as cause:
            prepared.load_state_dict(before, strict=False)
            raise CheckpointError.other_model(str(cause)) from cause


def _is_stand_in(path: str, state: FxState) -> bool:
    qparams = state.values_of(f"{path}.scale")
    return qparams is not None and bool((qparams[0] == 1).all()) and not bool(qparams[1].any())


def _current_observer(given: dict[str, Tensor], own: set[str], observer: Any) -> dict[str, Tensor]:
    """Return the state of an observer in the form in which torch saves it today.

    Before torch 1.8 the range of an observer without data was empty; before 1.12 ops with fixed qparams had
    fake-quantizes during calibration as well.
    """
    source = getattr(observer, "activation_post_process", observer)
    current = {}
    for name, value in given.items():
        if name not in own and has_fixed_qparams(observer):
            continue
        low = name.endswith("min_val")
        if (low or name.endswith("max_val")) and not value.numel() and not hasattr(source, "ch_axis"):
            value = torch.tensor(torch.inf if low else -torch.inf)
        current[name] = value
    return current


def _names_of(observer: nn.Module) -> set[str]:
    """Return the names in the state of ``observer`` that the state of FX's observer has too."""
    target = getattr(observer, "legacy", observer)
    return {
        name
        for name in target.state_dict()
        if name.rpartition(".")[2] not in (*COUNTS, "loaded_scale", "loaded_zero_point")
    }


def _load_observer(observer: nn.Module, given: dict[str, Tensor]) -> None:
    target = getattr(observer, "legacy", observer)
    assert isinstance(target, nn.Module)
    own = target.state_dict()
    # Observers keep the tensors they are given, without a copy.
    state = {name: value.clone() for name, value in given.items()}
    for name, value in own.items():
        if name.rpartition(".")[2] in COUNTS:
            state[name] = torch.zeros_like(value)
        elif name not in state:
            state[name] = value
        elif value.is_floating_point():
            state[name] = state[name].to(value.dtype)
    device = next((tensor.device for tensor in target.buffers()), None)
    ordered = OrderedDict((name, value.to(device)) for name, value in state.items())
    # Without version metadata torch treats the state as an old one, and resets eps.
    ordered._metadata = own._metadata  # type: ignore[attr-defined]
    target.load_state_dict(ordered)


def _observe_anew(prepared: GraphModule, node: Node) -> None:
    """Let the fake-quantize that ``node`` calls forget what it has observed, and observe the loaded weight; a
    weight that is computed is observed at its next call."""
    weight, fake_quantize = node.args[0], prepared.get_submodule(str(node.target))
    source: Any = getattr(fake_quantize, "activation_post_process", fake_quantize)
    if hasattr(source, "reset_min_max_vals"):
        source.reset_min_max_vals()
    if isinstance(weight, Node) and weight.op == "get_attr":
        with torch.no_grad():
            fake_quantize(attribute_of(prepared, weight))


def _hold(observer: Any, scale: Tensor, zero_point: Tensor) -> None:
    hold_qparams(observer, scale, zero_point)
    if "scale" in observer._buffers and "zero_point" in observer._buffers:
        # A fake-quantize computes with these.
        for name, value in (("scale", scale), ("zero_point", zero_point)):
            buffer = observer.get_buffer(name)
            buffer.resize_(value.reshape(-1).shape)
            buffer.copy_(value.reshape(-1))
    source = getattr(observer, "activation_post_process", None)
    if isinstance(source, nn.Module) and "min_val" in source._buffers:
        _set_range(source, scale, zero_point)


def _set_range(source: Any, scale: Tensor, zero_point: Tensor) -> None:
    """Set the observed range to the one that the qparams cover; training continues from it."""
    per_tensor = scale.numel() == 1 and not hasattr(source, "ch_axis")
    for name, bound in (("min_val", source.quant_min), ("max_val", source.quant_max)):
        value = (bound - zero_point) * scale
        buffer = source.get_buffer(name)
        value = value.reshape(() if per_tensor else -1).to(buffer.dtype)
        buffer.resize_(value.shape)
        buffer.copy_(value)


def _incomplete(problem: str, left: list[str], key: str) -> CheckpointError:
    more = f" It has, without a place here, {listed(left)}." if left else ""
    return CheckpointError.of(key, problem=problem, more=more)
