"""Legacy FX functions -> the functions of this package, in the process that runs a legacy script; and what
torch has removed, restored: modules, names and the FX engine's own."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from torchq_compat import pt2e, quantize_fx
from torchq_compat.model.other_tools import tool_error
from torchq_compat.port import names
from torchq_compat.quantize.first_call import adopt_parameters, at_once
from torchq_compat.support import torch_ao
from torchq_compat.support.process_state import held
from torchq_compat.support.torch_ao import QConfigMapping
from torchq_compat.support.user_warnings import warn_user

# Restore what torch has removed, for a legacy script: imports find the new modules, and capture functions
# exist again.


class _Redirected(MetaPathFinder, Loader):
    """A finder that imports the new module in place of a removed one."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        new = names.new_module(fullname)
        return None if new is None else ModuleSpec(fullname, self, origin=new, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = names.new_module(spec.name)
        assert new is not None
        module = importlib.import_module(new)
        vars(module).setdefault("__getattr__", functools.partial(_elsewhere, new))
        # The import system overwrites the spec of the new module with that of the old name.
        self._own = (module, module.__spec__)
        return module

    def exec_module(self, module: ModuleType) -> None:
        kept, spec = self._own
        if kept is module:
            module.__spec__ = spec


def _elsewhere(module: str, name: str) -> Any:
    """Return what ``module`` had by ``name`` in its time in torch, from where it is now."""
    if name not in names.NAMES_ELSEWHERE:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    home, now = names.NAMES_ELSEWHERE[name]
    return getattr(importlib.import_module(home), now)


def redirect_removed_imports() -> None:
    """Let imports of removed modules find the new ones, if torch has removed them."""
    if any(_is_there(name) for name in names.REMOVED):
        return
    if not any(isinstance(finder, _Redirected) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Redirected())


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def restore_removed_captures() -> None:
    """Give modules that have lost one of PT2E's first functions an equivalent one; ``torch._dynamo.export``
    captures what PT2E takes today where it is asked for aten."""
    for full, gave_module in names.REMOVED_CAPTURES.items():
        path, _, name = full.rpartition(".")
        module = importlib.import_module(path)
        if not hasattr(module, name):
            setattr(module, name, _capture(path, name, gave_module=gave_module))
        if not hasattr(module, "dynamic_dim"):
            module.dynamic_dim = _FreeSize  # type: ignore[attr-defined]
    for moved in names.MOVED_OF_EXPORTED:
        old, new = importlib.import_module(moved.legacy), importlib.import_module(moved.replacement)
        for name in moved.names:
            if not hasattr(old, name):
                setattr(old, name, getattr(new, name))
    dynamo = importlib.import_module("torch._dynamo")
    dynamo.export = _capturing_aten(dynamo.export)  # type: ignore[attr-defined]


class _FreeSize:
    """What ``dynamic_dim(tensor, dimension)`` returned: a constraint, which comparisons gave a range."""

    def __init__(self, tensor: Tensor, dimension: int) -> None:
        self.tensor, self.dimension = tensor, dimension

    def __le__(self, other: object) -> _FreeSize:
        return self

    __lt__ = __ge__ = __gt__ = __le__


def _capture(module: str, name: str, *, gave_module: bool) -> Callable[..., Any]:
    def capture(
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        dynamic_shapes: Any = None,
        constraints: Sequence[_FreeSize] | None = None,
        **settings: Any,
    ) -> Any:
        if gave_module:
            # The removed function traced with Dynamo; Quantizers need the source functions it records.
            settings.setdefault("strict", True)
        if constraints and dynamic_shapes is None:
            auto = torch.export.Dim.AUTO
            free = ({c.dimension: auto for c in constraints if c.tensor is arg} for arg in args)
            dynamic_shapes = tuple(dims or None for dims in free)
        program = torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes, **settings)
        return program.module() if gave_module else program

    capture.__name__, capture.__module__ = name, module
    return capture


def _capturing_aten(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``torch._dynamo.export``, which for ``aten_graph=True`` gives what PT2E's flow takes today."""

    @functools.wraps(original)
    def export(f: Any, *args: Any, aten_graph: bool = False, **settings: Any) -> Any:
        if not aten_graph or not isinstance(f, nn.Module):
            return original(f, *args, aten_graph=aten_graph, **settings)

        def captured(*inputs: Any) -> Any:
            free = tuple(dict.fromkeys(range(x.dim()), torch.export.Dim.AUTO) for x in inputs)
            dynamic_shapes = free if settings.get("tracing_mode") == "symbolic" else None
            program = torch.export.export(f, inputs, dynamic_shapes=dynamic_shapes, strict=True)
            return DynamoResult(program.module(), set())

        return captured(*args) if args else captured

    return export


class DynamoResult(NamedTuple):
    """What ``torch._dynamo.export`` returns: the graph module and the guards."""

    graph_module: nn.Module
    guards: set[Any]


# Stand-ins for modules of the FX engine that this torch no longer has, for imports of a legacy script.
#
# A stand-in has the functions that scripts are redirected to, and the configuration classes that FX's module
# re-exports; its other names are missing, as in torch.


#: Modules whose contents are all redirected.
ENGINE = frozenset(moved.legacy for moved in names.MOVED_FUNCTIONS)
#: The attribute that marks a stand-in.
STANDS_IN = "_torchq_compat_stands_in"


def legacy_module(name: str) -> ModuleType | None:
    """Import a module of torch by name; None if this torch does not have it, or there is only a stand-in."""
    try:
        module = importlib.import_module(name)
    except ImportError:
        return None
    return None if STANDS_IN in vars(module) else module


def put_stand_in(name: str, functions: Mapping[str, Callable[..., Any]]) -> None:
    """Let imports of module ``name`` find ``functions``, if it is a module of the FX engine.

    Args:
        name: dotted name of a module that cannot be imported.
        functions: the functions by their legacy names; they are added to those of an earlier call.
    """
    if name not in ENGINE:
        return
    module = sys.modules.get(name)
    if module is None:
        module = ModuleType(name, f"Stands for {name}, which this torch does not have.")

        def passed_on(attribute: str) -> Any:
            if not attribute.startswith("_") and hasattr(torch_ao, attribute):
                return getattr(torch_ao, attribute)
            raise AttributeError(
                f"module {name!r} has no attribute {attribute!r}: torch has removed the module, and "
                "torchq_compat has only what quantizes in its place"
            )

        vars(module).update({"__getattr__": passed_on, STANDS_IN: True})
        sys.modules[name] = module
        if (parent := legacy_module(name.rpartition(".")[0])) is not None:
            setattr(parent, name.rpartition(".")[2], module)
    vars(module).update(functions)


# Legacy FX functions -> the functions of this package, in the process that runs a legacy script.
#
# The functions are replaced on the legacy modules themselves, so every kind of import finds the new ones:
# by name, under an alias, through importlib, or as attributes of ``torch.ao.quantization``. The modules
# stay, because torch and torchao use their other contents; a module that torch has removed gets a stand-in.
# ``torch.ao.quantization.fx.custom_config`` is not redirected: ``torchq_compat.custom_config`` has its
# classes.


Function = Callable[..., Any]


#: Not in the table for ``rewrite``, since scripts can keep these names; redirected in a running process only.
BATCH_NORM_SWITCHES = names.Moved(
    "torch.ao.nn.intrinsic.qat",
    "torchq_compat.nn.intrinsic.qat",
    {name: name for name in ("freeze_bn_stats", "update_bn_stats")},
)
#: Private functions of FX that scripts call nevertheless.
PRIVATE_FUNCTIONS = (
    names.Moved(
        "torch.ao.quantization.quantize_fx",
        "torchq_compat.port.running.redirections",
        {"_prepare_fx": "prepare_fx", "_convert_fx": "convert_fx", "_fuse_fx": "fuse_fx"},
    ),
)
EAGER_MODE = names.Moved(
    "torch.ao.quantization.quantize", "torchq_compat.quantize_eager", names.unchanged(*names.EAGER_FLOW)
)
REDIRECTIONS = (
    *names.MOVED_FUNCTIONS,
    *names.EAGER_FUNCTIONS,
    *PRIVATE_FUNCTIONS,
    BATCH_NORM_SWITCHES,
    EAGER_MODE,
)


def redirect(
    wrap: Callable[[Function, Function], Function],
    instead: Mapping[str, str] = MappingProxyType({}),
    wrap_ours: Callable[[Function, Function], Function] | None = None,
) -> None:
    """Replace every legacy function that a module of this process holds.

    Args:
        wrap: (function of ours, the legacy function it replaces) -> the replacement. If torch has removed the
            legacy function, both arguments are ours.
        instead: function of ours -> the function to use in its place.
        wrap_ours: as ``wrap``, for the functions of this package, which are replaced too; None: they are not.
    """
    replacements: dict[int, Function] = {}
    for moved in REDIRECTIONS:
        ours = importlib.import_module(moved.replacement)
        functions = {name: getattr(ours, instead.get(new, new)) for name, new in moved.names.items()}
        legacy = legacy_module(moved.legacy)
        for name, function in functions.items():
            # Names do not match them: the replacements of a private and a public function have the same.
            if wrap_ours is not None and (legacy is None or hasattr(legacy, name)):
                replacements.setdefault(id(function), wrap_ours(function, getattr(legacy, name, function)))
        if legacy is None:
            put_stand_in(moved.legacy, {name: wrap(ours, ours) for name, ours in functions.items()})
            continue
        for name, function in functions.items():
            original = getattr(legacy, name, None)
            # The old namespace re-exports only some functions of the new one.
            if original is not None:
                replacements.setdefault(id(original), wrap(_with_parameters_of(original, function), original))
    replace_everywhere(replacements)


def _with_parameters_of(original: Function, function: Function) -> Function:
    """Return ``function``, ignoring keywords that only ``original`` has and that do not matter here."""
    dropped = set(inspect.signature(original).parameters) - set(inspect.signature(function).parameters)
    if not dropped:
        return function

    @functools.wraps(function, updated=())  # without ``at_once``, which does not drop them
    def without_dropped(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{key: value for key, value in kwargs.items() if key not in dropped})

    return without_dropped


def replace_everywhere(replacements: dict[int, Function]) -> None:
    """Set each attribute of a loaded module whose value has an id in ``replacements`` to the replacement."""
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in replacements:
                setattr(module, name, replacements[id(value)])


def redirect_pt2e(tell: Callable[[str], None]) -> None:
    """Put ``torchq_compat.pt2e`` in the place of torchao's prepare and convert, by their first names too.

    Args:
        tell: is given one line for each model, for the summary.
    """
    flow, replacements = importlib.import_module(names.MOVED_PT2E[0].legacy), dict[int, Function]()
    for name, new in names.PT2E_FUNCTIONS.items():
        original = getattr(flow, new)
        ours = replacements.setdefault(id(original), _of_mappings(getattr(pt2e, new), original, tell))
        if name != new:
            setattr(flow, name, ours)
    replace_everywhere(replacements)


def _of_mappings(function: Function, original: Function, tell: Callable[[str], None]) -> Function:
    """Return ``function`` of PT2E; a QConfigMapping, as the first one took, becomes a Quantizer."""

    @functools.wraps(function)
    def of_mappings(model: Any, *args: Any, **kwargs: Any) -> Any:
        if str(sys._getframe(1).f_globals.get("__name__")).startswith("torchq_compat."):
            return original(model, *args, **kwargs)  # This package's own flow.
        quantizer = args[0] if args else kwargs.get("quantizer", kwargs.get("qconfig_mapping"))
        if function.__name__.startswith("prepare") and isinstance(quantizer, (QConfigMapping, dict)):
            backend = kwargs.get("backend_config", args[2] if len(args) > 2 else None)
            args, kwargs = (pt2e.quantizer_from(quantizer, backend),), {}
        result = function(model, *args, **kwargs)
        done = "converted" if function.__name__.startswith("convert") else "prepared"
        tell(f"  {type(model).__name__}, {done} by torchq_compat.pt2e.{function.__name__}")
        return result

    return of_mappings


# A switch that restores FX's own functions in a process that redirects them to this package's.


_CALLED: ContextVar[bool] = ContextVar("torchq_compat_fx_is_called", default=False)


def fx_is_called() -> bool:
    return _CALLED.get()


def calling_fx() -> AbstractContextManager[None]:
    """Let FX's functions be FX's own inside the ``with`` block, also if user classes call them."""
    return held(_CALLED, True)


# FX's numbers of trained models in a legacy script under ``run``: convert with the observers' qparams.


def converting_as_fx(function: Function) -> Function:
    """Return ``function``; if it converts, with ``observer_qparams=True`` unless the script gives it."""
    if function.__name__ not in names.CONVERTING:
        return function

    return functools.update_wrapper(functools.partial(function, observer_qparams=True), function)


def training_as_fx(function: Function) -> Function:
    """Return ``function``; what prepare_qat_fx returns has the parameters of the float model itself."""
    if function.__name__ != "prepare_qat_fx":
        return function

    @functools.wraps(function)
    def preparing(*args: Any, **kwargs: Any) -> Any:
        prepared = function(*args, **kwargs)
        model = args[0] if args else kwargs["model"]
        adopt_parameters(model.named_parameters(remove_duplicate=False), prepared)
        return prepared

    return preparing


# Make the Numeric Suite raise an error with advice if a legacy script gives it a plain state of our models,
# as from a file, in which it would silently find nothing. Models, and the states they return, refuse it too.


MODULES = ("torch.ao.ns._numeric_suite", "torch.ao.ns._numeric_suite_fx")
#: Keys that only the state of a captured, converted model has.
OUR_KEY = re.compile(r"(.*\.)?(_frozen_param\d+|_scale_\d+)")


def refuse_numeric_suite() -> None:
    """Let the functions of the suite raise a ScriptError if they are given a state of a model of ours."""
    replacements: dict[int, Callable[..., Any]] = {}
    for name in MODULES:
        # The FX suite is missing if torch has no FX engine.
        module = legacy_module(name)
        for function in vars(module).values() if module else ():
            if inspect.isfunction(function) and function.__module__ == name:
                replacements[id(function)] = _refusing(function)
    replace_everywhere(replacements)


def _refusing(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        states = (value for value in (*args, *kwargs.values()) if type(value) in (dict, OrderedDict))
        if any(isinstance(key, str) and OUR_KEY.fullmatch(key) for state in states for key in state):
            raise tool_error(function.__name__)
        return function(*args, **kwargs)

    return checked


# Private functions of FX that scripts call, with their signatures, on the functions of this package.


def prepare_fx(
    model: nn.Module,
    qconfig_mapping: Any,
    is_qat: bool,
    example_inputs: tuple[Any, ...],
    prepare_custom_config: Any = None,
    _equalization_config: Any = None,
    backend_config: Any = None,
    is_standalone_module: bool = False,
) -> GraphModule:
    """Replace ``torch.ao.quantization.quantize_fx._prepare_fx``."""
    prepare = at_once(quantize_fx.prepare_qat_fx) if is_qat else at_once(quantize_fx.prepare_fx)
    settings = prepare_custom_config, _equalization_config, backend_config
    prepared: GraphModule = prepare(model, qconfig_mapping, example_inputs, *settings)
    return prepared


def convert_fx(
    graph_module: GraphModule,
    is_reference: bool = False,
    convert_custom_config: Any = None,
    is_standalone_module: bool = False,
    _remove_qconfig: bool = True,
    qconfig_mapping: Any = None,
    backend_config: Any = None,
    is_decomposed: bool = False,
    keep_original_weights: bool = False,
    *,
    observer_qparams: bool = False,
) -> GraphModule:
    """Replace ``torch.ao.quantization.quantize_fx._convert_fx``."""
    arguments = [graph_module, convert_custom_config, _remove_qconfig, qconfig_mapping, backend_config]
    convert = at_once(quantize_fx.convert_to_reference_fx)
    if not is_reference and not is_decomposed:
        convert = at_once(quantize_fx.convert_fx)
        arguments.append(keep_original_weights)
    converted: GraphModule = convert(*arguments, observer_qparams=observer_qparams)
    return converted


def convert_to_reference_fx(
    graph_module: GraphModule, is_reference: bool = False, *args: Any, **kwargs: Any
) -> GraphModule:
    """Convert as ``convert_fx`` does, always to a reference model; for ``torchq-compat run --reference``."""
    return convert_fx(graph_module, True, *args, **kwargs)


def fuse_fx(
    model: nn.Module, is_qat: bool = False, fuse_custom_config: Any = None, backend_config: Any = None
) -> nn.Module:
    """Replace ``torch.ao.quantization.quantize_fx._fuse_fx``; ``prepare_qat_fx`` fuses by itself."""
    if is_qat:
        warn_user("TQ708")
        return model
    return quantize_fx.fuse_fx(model, fuse_custom_config, backend_config)
