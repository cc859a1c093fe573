"""Models whose example inputs are missing or do not run, which FX accepts because it never looks at them.

``torch.export`` captures a model by running it. Without inputs that run, prepare warns at the line of the
call and returns a model that waits: its first call has arguments that do run. It is then prepared with these,
and becomes the prepared model, or the converted one if the script has converted it meanwhile. Until then it
has the modules, parameters, buffers and state of the float model.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torchao.quantization.pt2e.quantizer import Quantizer

from torchq_compat.errors import InputError, ModuleAttributeError
from torchq_compat.model.view_hooks import HOOK_STATE, HOOKED, check_hookable
from torchq_compat.model.views import CONTAINERS, ModuleView, hand_over_views
from torchq_compat.read.example_inputs import by_position, is_old_config
from torchq_compat.read.qconfig_mappings import read_qconfig_mapping
from torchq_compat.read.qspecs import OpSpecs
from torchq_compat.support.graph_nodes import copied_model
from torchq_compat.support.process_state import TURNS, is_exporting
from torchq_compat.support.torch_ao import PrepareCustomConfig
from torchq_compat.support.upstream import pytree
from torchq_compat.support.user_warnings import warn_user

EXAMPLES = "example_inputs"
#: The code of the error about them.
NO_EXAMPLES = "TQ902"
CUSTOM_CONFIG = "prepare_custom_config"
#: The attribute of a function that has it without waiting.
AT_ONCE = "at_once"
#: What the waiting model shares with the float model.
SHARED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
#: Attributes that only the captured model has, and that the float model must not answer for.
OF_A_GRAPH = ("graph", "code", "recompile", "print_readable", "reference", "record", "lowering")
#: Attribute for the object that a waiting model took the attributes of.
BUILT = "_torchq_compat_made"
OWN_HOOKS = (*HOOK_STATE, "_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook")

P = ParamSpec("P")
R = TypeVar("R")
Function = Callable[..., Any]


def at_once(function: Function) -> Function:
    """Return ``function``, which prepares or converts, so that it raises where it would wait."""
    return cast("Function", getattr(function, AT_ONCE, function))


def waits_for_first_call(function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function``, which prepares, so that it returns a model that waits if the example inputs are
    missing or do not run."""

    @functools.wraps(function)
    def prepare(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except InputError as error:
            if error.code != NO_EXAMPLES:
                raise
            first, *others = inspect.signature(function).parameters
            given = {**dict(zip((first, *others), args, strict=False)), **kwargs}
            warn_user("TQ316", problem=error.message.rstrip("."))
            model = copied_model(cast("nn.Module", given.pop(first)))
            is_qat = function.__name__ == "prepare_qat_fx" or bool(given.get("is_qat"))
            waiting = WaitingModel(model, _Preparation(function, given), error.message)
            vars(waiting)["training"] = is_qat and model.training
            return cast("R", waiting)

    setattr(prepare, AT_ONCE, function)
    return prepare


def takes_waiting_models(function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function``, which converts, so that a model that waits is converted at its first call."""
    first = next(iter(inspect.signature(function).parameters))

    @functools.wraps(function)
    def convert(*args: P.args, **kwargs: P.kwargs) -> R:
        source = args[0] if args else kwargs.get(first)
        if not isinstance(source, WaitingModel) or source.is_converted:
            return function(*args, **kwargs)
        others = {key: value for key, value in kwargs.items() if key != first}
        if _is_static(cast("_Preparation", source.make)):
            warn_user("TQ325", function=function.__name__)
        waiting = copy.deepcopy(source)
        waiting.eval()
        vars(waiting).update(make=_Conversion(function, args[1:], others, source.make), is_converted=True)
        return cast("R", waiting)

    setattr(convert, AT_ONCE, function)
    return convert


def adopt_parameters(named: Iterable[tuple[str, nn.Parameter]], module: nn.Module) -> list[str]:
    """Put parameters, which an optimizer has, in the place of their copies in ``module``; return the names
    of those that have no place there."""
    lost = []
    for name, parameter in named:
        path, _, leaf = name.rpartition(".")
        owner = _submodule(module, path)
        copied = None if owner is None else owner._parameters.get(leaf)
        if owner is None or copied is None or copied.shape != parameter.shape:
            lost.append(name)
            continue
        parameter.data = copied.data
        owner._parameters[leaf] = parameter
    return lost


@dataclass(frozen=True)
class _Preparation:
    """A call of a function that prepares, to be made with other example inputs; pickled by its name.

    Attributes:
        given: the arguments of the call behind the model, by name.
    """

    function: Function
    given: Mapping[str, Any]

    def __call__(self, model: nn.Module, examples: tuple[Any, ...]) -> nn.Module:
        given, stands = {**self.given, EXAMPLES: examples}, self.given.get(EXAMPLES)
        is_config = isinstance(stands, (dict, PrepareCustomConfig)) and is_old_config(stands)
        if stands and is_config and given.get(CUSTOM_CONFIG) is None:
            # The third argument before torch 1.13, which FX ignores today.
            given[CUSTOM_CONFIG] = stands
        prepared: nn.Module = self.function(model, **given)
        return prepared

    def __reduce__(self) -> Any:
        return _named_again, (_Preparation, *_name_of(self.function), dict(self.given))


def _is_static(preparation: _Preparation) -> bool:
    """Return whether activations are quantized by what calibration has seen."""
    mapping: Any = preparation.given.get("qconfig_mapping") or preparation.given.get("qconfig_dict")
    if isinstance(mapping, Quantizer):
        return True
    return any(qconfig and OpSpecs(qconfig).is_static for qconfig in read_qconfig_mapping(mapping).qconfigs)


@dataclass(frozen=True)
class _Conversion:
    function: Function
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    prepare: Function

    def __call__(self, model: nn.Module, examples: tuple[Any, ...]) -> nn.Module:
        converted: nn.Module = self.function(self.prepare(model, examples), *self.args, **self.kwargs)
        return converted

    def __reduce__(self) -> Any:
        named = _name_of(self.function)
        return _named_again, (_Conversion, *named, self.args, dict(self.kwargs), self.prepare)


def _name_of(function: Function) -> tuple[str, str]:
    return function.__module__, function.__qualname__


def _named_again(kind: Callable[..., Any], module: str, name: str, *others: Any) -> Any:
    named: Any = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    return kind(at_once(named), *others)


@dataclass
class _Since:
    """What a script did with a model while it waits.

    Attributes:
        mode: the last argument of ``train()``; None if there was no call.
        flags: path -> the training flag before the first ``train()``.
        state: the arguments of a ``load_state_dict`` that only the captured model can take.
        gave_parameters: whether an optimizer may have the parameters.
    """

    mode: bool | None = None
    flags: dict[str, bool] = field(default_factory=dict)
    state: tuple[Any, bool, bool] | None = None
    gave_parameters: bool = False


class WaitingModel(nn.Module):
    """A model that is captured at its first call, and then becomes the model ``make`` returns.

    Args:
        float_model: a copy of the script's model; its modules and tensors are those of this model.
        make: (float model, positional arguments) -> the prepared or converted model.
        problem: why there are no example inputs that run.
        is_converted: whether ``make`` converts.
    """

    float_model: nn.Module
    make: Callable[[nn.Module, tuple[Any, ...]], nn.Module]
    problem: str
    is_converted: bool
    since: _Since
    meta: dict[str, Any]

    def __init__(
        self,
        float_model: nn.Module,
        make: Callable[[nn.Module, tuple[Any, ...]], nn.Module],
        problem: str,
        *,
        is_converted: bool = False,
        since: _Since | None = None,
    ) -> None:
        super().__init__()
        vars(self).update({name: vars(float_model)[name] for name in SHARED if name in vars(float_model)})
        # Not as a submodule: the float model's modules are this model's.
        vars(self).update(float_model=float_model, make=make, problem=problem, is_converted=is_converted)
        vars(self).update(since=since or _Since(), meta={}, training=float_model.training)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Capture the model with these arguments, become the model that is made, and call it."""
        if torch.jit.is_tracing() or is_exporting():  # type: ignore[attr-defined,no-untyped-call]
            self._refuse("torch.jit.trace and torch.export")
        with TURNS:
            if type(self) is not WaitingModel:  # Another thread's call was first.
                return self(*args, **kwargs)
            built = self._build(args, kwargs)
            own = {name: vars(self)[name] for name in OWN_HOOKS}
            object.__setattr__(self, "__dict__", built.__dict__)
            self.__class__ = type(built)  # type: ignore[assignment]
            vars(self)[BUILT] = built  # Finalizers forget its packed weights with it.
            hand_over_views(built, self)
            result = self(*args, **kwargs)
        # Give it the hooks only now: torch calls those of this first call around this method.
        self.__dict__.update(own)
        return result

    def _build(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Module:
        try:
            bound = by_position(inspect.signature(self.float_model.forward)).bind(*args, **kwargs)
        except (TypeError, ValueError) as cause:  # A scripted model has no signature.
            raise InputError.does_not_fit(type(self.float_model).__name__, cause) from cause
        if len(bound.args) < len(args) + len(kwargs):
            bound.apply_defaults()
        since, modules = self.since, dict(self.named_modules())
        modes = {path: module.training for path, module in modules.items()}
        hooks = {path: _taken_hooks(module) for path, module in modules.items() if path}
        try:
            self._set_flags({**modes, **since.flags})
            with torch.inference_mode(mode=False), torch.enable_grad():
                result = self.make(self.float_model, pytree.tree_map(_out_of_inference_mode, bound.args))
        except BaseException:
            self._set_flags(modes)
            for path, state in hooks.items():
                modules[path].__dict__.update(state)
            raise
        lost = adopt_parameters(nn.Module.named_parameters(self, remove_duplicate=False), result)
        if lost and self.since.gave_parameters and self.training:
            warn_user("TQ326", names=", ".join(lost[:3]) + " and more" * (len(lost) > 3))
        if since.mode is not None:
            result.train(since.mode)
        if since.state is not None:
            state, strict, assign = since.state
            result.load_state_dict(state, strict=strict, assign=assign)
        for path, state in hooks.items():
            _give_hooks(result, path, state)
        cast("GraphModule", result).meta.update(self.meta)
        return result

    def _set_flags(self, flags: Mapping[str, bool]) -> None:
        for path, module in self.float_model.named_modules():
            module.training = flags.get(path, module.training)

    def train(self, mode: bool = True) -> WaitingModel:
        """Set the mode, which the captured model gets too."""
        if self.since.mode is None:
            self.since.flags = {path: module.training for path, module in self.float_model.named_modules()}
        self.since.mode = mode
        return super().train(mode)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the parameters of the float model, which the captured model keeps."""
        self.since.gave_parameters = True
        return super().named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of the float model.

        Raises:
            InputError: the model was converted, and nothing is quantized before its first call.
        """
        if self.is_converted:
            self._refuse("state_dict")
        return super().state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load the state of a float model now, and any other into the captured model, at the first call."""
        if not self.is_converted and state_dict.keys() <= super().state_dict().keys():
            return super().load_state_dict(state_dict, strict=strict, assign=assign)
        self.since.state = (copy.copy(state_dict), strict, assign)
        return nn.Module().load_state_dict({})

    def __deepcopy__(self, memo: dict[int, Any]) -> WaitingModel:
        settings: Any = {"is_converted": self.is_converted, "since": copy.copy(self.since)}
        copied = WaitingModel(copied_model(self.float_model), self.make, self.problem, **settings)
        vars(copied).update({name: copy.copy(vars(self)[name]) for name in ("training", "meta", *OWN_HOOKS)})
        return copied

    def __reduce__(self) -> Any:
        settings = functools.partial(WaitingModel, is_converted=self.is_converted, since=self.since)
        return settings, (self.float_model, self.make, self.problem), {"training": self.training}

    def __prepare_scriptable__(self) -> NoReturn:
        self._refuse("torch.jit.script")

    def __getattr__(self, name: str) -> Any:
        if name in OF_A_GRAPH:
            raise ModuleAttributeError.of(
                "TQ970.before_first_call", name=name, problem=self.problem.rstrip(".")
            )
        try:
            return super().__getattr__(name)
        except AttributeError:
            # FX keeps preserved attributes; which those are is known at the first call.
            if name.startswith("_") or not hasattr(vars(self).get("float_model"), name):
                raise
        return getattr(self.float_model, name)

    def _refuse(self, what: str) -> NoReturn:
        raise InputError.of("TQ902.not_called", what=what, problem=self.problem.rstrip("."))

    def __repr__(self) -> str:
        return f"{type(self.float_model).__name__}, captured at its first call: {self.problem}"


def _taken_hooks(module: nn.Module) -> dict[str, Any]:
    """Take the forward hooks off ``module``, which would be captured with it, and return them."""
    state = {name: vars(module)[name] for name in HOOK_STATE}
    if not any(state.values()):
        return {}
    vars(module).update({name: OrderedDict() for name in HOOK_STATE})
    return state


def _give_hooks(module: nn.Module, path: str, state: dict[str, Any]) -> None:
    """Give the module or view at ``path`` the hooks themselves, whose handles then remove them there."""
    if not state:
        return
    owner = _submodule(module, path)
    try:
        if owner is not None and isinstance(owner, ModuleView):
            check_hookable(cast("GraphModule", module), path)
            HOOKED.add(owner)
        # A plain module only holds others, as in FX.
        is_called = owner is not None and type(owner) not in CONTAINERS
        reason = "" if is_called else "the captured model calls no module there"
    except ModuleAttributeError as error:
        reason = error.message
    if owner is None or reason:
        warn_user("TQ327", path=path, reason=reason)
        return
    vars(owner).update(state)


def _submodule(model: nn.Module, path: str) -> nn.Module | None:
    module: nn.Module | None = model
    for name in path.split(".") if path else ():
        module = None if module is None else module._modules.get(name)
    return module


def _out_of_inference_mode(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) and value.is_inference() else value
