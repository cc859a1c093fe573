"""What legacy models do in Python that torch.export does not see or keep."""

import builtins
import dis
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, update_wrapper
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from torchq_compat.capture.packed_sequences import ListOfTensor
from torchq_compat.support import metadata
from torchq_compat.support.graph_nodes import nodes_behind
from torchq_compat.support.metadata import CUSTOM
from torchq_compat.support.process_state import alone, is_exporting, own_attribute
from torchq_compat.support.torch_ao import FloatFunctional
from torchq_compat.support.upstream import WRAPPED_FUNCTIONS, pytree

# Makes ``len(tensor)``, ``int(size)``, ``math.sqrt(size)``, ``max(lengths)`` and the like traceable during
# capture; torch.export does not trace them by itself.
#
# ``len`` and ``int`` return a plain integer, which fixes the size; ``size(0)`` is the same number and stays
# free, as do ``torch.sym_int`` of it and the ``item()`` of a tensor of one integer. Python that iterates
# over lengths fixes their number; ``lengths.max()`` does not, and a list of lengths is not taken apart
# until it is read (``lengths_as_lists``). FX has ``torch.fx.wrap("len")``, which changes the globals of the
# user's module while it traces. Here the methods of the package's own copy of the model, and the functions
# that these call by a name, are rebound with globals of their own.


#: Packages whose methods are not rebound: they do not convert tensors to numbers.
LIBRARIES = ("torch", __name__.partition(".")[0])
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
#: Functions of one number in ``math`` and numpy -> what computes them of a size; an exported program has no
#: others.
OF_SIZES: dict[str, Callable[[Any], Any]] = {"sqrt": torch.sym_sqrt, "ceil": math.ceil, "floor": math.floor}
#: Pairs of something of Python's, and what methods use in its place.
Replaced = Sequence[tuple[object, Any]]


@contextmanager
def seen_python(model: nn.Module, replaced: Replaced) -> Iterator[None]:
    """Let the methods of ``model``, a copy of the user's, use what is ``replaced`` while the context is
    active."""
    functions = _Functions(replaced)
    with ExitStack() as bound:
        for module in model.modules():
            for name, method in _own_methods(type(module)).items():
                is_static = isinstance(method, staticmethod)
                function = method.__func__ if is_static else method
                own = functions.rebound(function)
                if own is not function and name not in vars(module):
                    value = own if is_static else MethodType(own, module)
                    bound.enter_context(own_attribute(module, name, value))
        yield


@dataclass(frozen=True)
class _Called:
    """A replacement of the class ``kind``: ``call`` answers its calls, but not those of ``list[Tensor]``."""

    kind: Any
    call: Callable[..., Any]

    def __call__(self, *values: Any) -> Any:
        return self.call(*values)

    def __getitem__(self, item: Any) -> Any:
        return self.kind[item]


class _Changed:
    """A replacement of ``module`` with other ``functions`` of some names; numpy's take sizes as numbers."""

    def __init__(self, module: ModuleType, functions: Mapping[str, Any]) -> None:
        vars(self).update(functions)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return partial(_with_numbers, value) if type(value).__name__ == "ufunc" else value


def _with_numbers(function: Callable[..., Any], *values: Any, **named: Any) -> Any:
    """Call ``function`` after asking for the value of each size."""
    return function(*map(_as_plain, values), **named)


def _as_plain(value: Any) -> Any:
    if isinstance(value, torch.SymInt):
        return builtins.int(value)
    return builtins.float(value) if isinstance(value, torch.SymFloat) else value


class SeenFunctions:
    """The functions that methods call in place of Python's builtins.

    Attributes:
        were_called: whether one of them computed something in place of the builtin.
    """

    def __init__(self) -> None:
        self.were_called = False

    def replaced(self) -> Replaced:
        return (
            (len, self._len),
            (int, self._int),
            (float, self._float),
            *((kind, _Called(kind, partial(self._listed, kind))) for kind in (list, tuple)),
            (sorted, self._sorted),
            (range, self._range),
            (divmod, self._divmod),
            *((getattr(builtins, name), partial(self._reduced, name)) for name in ("max", "min", "sum")),
            *self._of_module(math),
            *(() if (numpy := sys.modules.get("numpy")) is None else self._of_module(numpy)),
        )

    def _of_module(self, module: Any) -> Iterator[tuple[object, Any]]:
        """Yield what is used in place of the functions in ``module`` of one number, and of itself."""
        functions = {
            name: partial(self._of_number, getattr(module, name), function)
            for name, function in OF_SIZES.items()
            if hasattr(module, name)
        }
        yield module, _Changed(module, functions)
        yield from ((getattr(module, name), function) for name, function in functions.items())

    def _of_number(
        self, plain: Callable[..., Any], function: Callable[..., Any], *values: Any, **named: Any
    ) -> Any:
        is_size = len(values) == 1 and isinstance(values[0], (torch.SymInt, torch.SymFloat))
        return function(values[0]) if self._is_asked(is_size) else plain(*values, **named)

    def _divmod(self, over: Any, under: Any) -> Any:
        if not self._is_asked(isinstance(over, torch.SymInt) or isinstance(under, torch.SymInt)):
            return builtins.divmod(over, under)
        return over // under, over % under

    def _len(self, value: Any) -> Any:
        if not self._is_asked(isinstance(value, Tensor) and bool(value.dim())):
            return builtins.len(value)
        return value.shape[0]

    def _int(self, value: Any = 0, *base: Any) -> Any:
        is_size = isinstance(value, (torch.SymInt, torch.SymFloat))
        is_one = isinstance(value, Tensor) and value.dtype in INTEGERS
        if not self._is_asked(is_size or is_one):
            return builtins.int(value, *base)
        result: Any = torch.sym_int(value) if is_size else value.item()  # type: ignore[no-untyped-call]
        return result

    def _float(self, value: Any = 0.0) -> Any:
        if not self._is_asked(isinstance(value, (torch.SymInt, torch.SymFloat))):
            return builtins.float(value)
        return torch.sym_float(value)  # type: ignore[no-untyped-call]

    def _listed(self, kind: Callable[..., Any], *values: Any) -> Any:
        if not self._is_asked(len(values) == 1 and _are_numbers(values[0])):
            return kind(*values)
        return ListOfTensor(_tensor_of(values[0]), partial(builtins.list, values[0]))

    def _sorted(self, values: Any, **options: Any) -> Any:
        if not self._is_asked(_are_numbers(values) and "key" not in options):
            return builtins.sorted(values, **options)
        result = _tensor_of(values).sort(descending=bool(options.get("reverse", False))).values
        return ListOfTensor(result, partial(builtins.sorted, values, **options))

    def _range(self, *bounds: Any) -> Any:
        """Ask how many numbers a range with a stride has; ``range`` itself asks for its bounds."""
        start, stop, step = bounds if len(bounds) == 3 else (0, 0, 1)
        has_stride = type(step) is int and abs(step) > 1
        if not self._is_asked(has_stride and any(isinstance(item, torch.SymInt) for item in (start, stop))):
            return builtins.range(*bounds)
        count = builtins.int(-((start - stop) // step))
        return [start + step * index for index in builtins.range(count)]

    def _reduced(self, name: str, *values: Any, **options: Any) -> Any:
        if not self._is_asked(len(values) == 1 and not options and _are_numbers(values[0])):
            return getattr(builtins, name)(*values, **options)
        result = getattr(_tensor_of(values[0]), name)()
        return result if isinstance(values[0], Tensor) else result.item()

    def _is_asked(self, is_of_tensors: bool) -> bool:
        if not is_of_tensors or get_proxy_mode() is None:
            return False
        self.were_called = True
        return True


def _are_numbers(value: Any) -> bool:
    """Return whether ``value`` may be the lengths of sequences, as a tensor or as a list not taken apart."""
    if isinstance(value, ListOfTensor):
        return value.tensor is not None
    return isinstance(value, Tensor) and value.dim() == 1 and value.dtype in INTEGERS


def _tensor_of(value: Any) -> Any:
    return value.tensor if isinstance(value, ListOfTensor) else value


def _own_methods(module_type: type[nn.Module]) -> dict[str, Any]:
    """Return the methods in ``module_type`` that the user wrote, static ones too, by name."""
    matches: dict[str, Any] = {}
    for base in reversed(module_type.__mro__):
        matches.update(vars(base))
    return {
        name: method
        for name, method in matches.items()
        if _is_users(method.__func__ if isinstance(method, staticmethod) else method)
        and not name.startswith("__")
    }


def _is_users(value: Any) -> TypeGuard[FunctionType]:
    """Return whether ``value`` is a function that the user wrote in Python, or a decorator's around one."""
    if not isinstance(value, FunctionType):
        return False
    is_own = str(value.__globals__.get("__name__")).partition(".")[0] not in LIBRARIES
    return is_own or _is_users(vars(value).get("__wrapped__"))


class _Functions:
    """The user's functions, and copies of those that use what is ``replaced``, or call such a function."""

    def __init__(self, replaced: Replaced) -> None:
        self.replaced = replaced
        self._rebound: dict[FunctionType, FunctionType] = {}

    def rebound(self, function: FunctionType) -> FunctionType:
        """Return the copy of ``function``; the function itself if it uses nothing that is replaced."""
        if function not in self._rebound:
            self._rebound[function] = function  # What calls itself calls the user's.
            used, cells = self._used(function), function.__closure__ or ()
            closure = tuple(map(self._cell, cells))
            if used or any(new is not old for new, old in zip(closure, cells, strict=True)):
                self._rebound[function] = with_globals(function, used, closure)
        return self._rebound[function]

    def _cell(self, cell: CellType) -> CellType:
        """Return a cell with what is used in place of what ``cell`` holds, as a decorator's function."""
        try:
            value = cell.cell_contents
        except ValueError:  # It is empty.
            return cell
        new = value if isinstance(value, type) else self._in_place_of(value)
        return cell if new is value else CellType(new)

    def _used(self, function: FunctionType) -> dict[str, Any]:
        """Return the global names that ``function`` reads -> what is used in place of what they mean; not for
        a class that it does more with than call it, as a function can replace a class only in calls."""
        codes = list(_codes(function.__code__))
        names = {name for code in codes for name in code.co_names}
        meanings = {name: function.__globals__.get(name, getattr(builtins, name, None)) for name in names}
        result = {
            name: new for name, value in meanings.items() if (new := self._in_place_of(value)) is not value
        }
        reads: dict[str, list[bool]] = {}
        modules = {old.__name__ for old, _ in self.replaced if isinstance(old, ModuleType)}
        for code in codes if result or not modules.isdisjoint(names) else ():
            for instruction in dis.get_instructions(code):
                if instruction.opname == "IMPORT_NAME" and instruction.argval in modules:
                    own = {**vars(builtins), "__import__": self._imported}
                    result["__builtins__"], reads["__builtins__"] = own, [True]
                if instruction.opname == "LOAD_GLOBAL":
                    # The lowest bit is set if the instruction prepares a call.
                    reads.setdefault(instruction.argval, []).append(bool((instruction.arg or 0) & 1))
        return {
            name: new
            for name, new in result.items()
            if name in reads and (all(reads[name]) or not isinstance(meanings.get(name), type))
        }

    def _imported(self, *args: Any, **kwargs: Any) -> Any:
        return self._in_place_of(__import__(*args, **kwargs))

    def _in_place_of(self, value: Any) -> Any:
        if isinstance(value, _Marked) and _is_users(value.function):
            function = self.rebound(value.function)
            return value if function is value.function else _Marked(value.name, function, value.counter)
        if _is_users(value):
            return self.rebound(value)
        return next((new for old, new in self.replaced if value is old), value)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield ``code`` and that of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def with_globals(
    function: FunctionType, changed: Mapping[str, Any], closure: tuple[CellType, ...] | None = None
) -> FunctionType:
    """Return a copy of ``function`` in which the names in ``changed`` mean something else.

    Args:
        closure: the cells of the copy, if not those of ``function``.
    """
    names, cells = {**function.__globals__, **changed}, function.__closure__ if closure is None else closure
    result = FunctionType(function.__code__, names, function.__name__, function.__defaults__, cells)
    result.__kwdefaults__ = function.__kwdefaults__
    return update_wrapper(result, function)  # type: ignore[return-value]


# Functions under ``torch.fx.wrap``, which FX keeps as one float call.
#
# FX replaces such a function in the globals of its Python module while it traces. Here the function is
# traced through, and its nodes are marked, so that nothing inside is quantized.


#: (function name, number of the call in the capture)
WrappedCall = tuple[str, int]


def wrapped_call_of(node: Node) -> WrappedCall | None:
    """Return the call of a wrapped function that ``node`` was made in; None if there is none."""
    result = (node.meta.get(CUSTOM) or {}).get(metadata.WRAPPED_CALL.name)
    return result if isinstance(result, tuple) else None


@contextmanager
def marked_functions() -> Iterator[None]:
    """Mark the nodes that wrapped Python functions make while the context is active."""
    counter = itertools.count()
    with alone(), ExitStack() as restored:
        for namespace, name in _registered():
            restored.callback(namespace.__setitem__, name, namespace[name])
            namespace[name] = _Marked(name, namespace[name], counter)
        yield


def _registered() -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the globals and name of each Python function under ``torch.fx.wrap`` that is not torch's own."""
    for (_, name), namespace in list(WRAPPED_FUNCTIONS.items()):
        own = str(namespace.get("__name__", "")).split(".")[0] == "torch"
        function = namespace.get(name)
        if not own and callable(function) and function is not getattr(builtins, name, None):
            yield namespace, name


class _Marked:
    """A function under ``torch.fx.wrap``, whose calls mark the nodes that they make."""

    def __init__(self, name: str, function: Callable[..., Any], counter: Iterator[int]) -> None:
        update_wrapper(self, function)
        self.name, self.function, self.counter = name, function, counter

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Other threads may call the function, and read the same mode.
        mode: Any = get_proxy_mode() if is_exporting() else None
        if mode is None:
            return self.function(*args, **kwargs)
        last = next(reversed(mode.tracer.graph.nodes))
        result = self.function(*args, **kwargs)
        marker = (self.name, next(self.counter))
        for node in nodes_behind(last):
            # The outermost call overwrites the marks of inner ones.
            node.meta[CUSTOM] = {**(node.meta.get(CUSTOM) or {}), metadata.WRAPPED_CALL.name: marker}
        return result


# Makes nn.Identity visible in an exported graph; FX kept it as an op that shares its input's observer.
#
# Without this op ``linear -> identity -> relu`` would look like a pair that the backend fuses. The Identity
# inside a FloatFunctional is no op in FX either: FX replaces such modules by FXFloatFunctional, which has
# none.


def show_identities(model: nn.Module) -> None:
    """Make every Identity in ``model``, the package's own copy, export as an ``aten.alias`` of each input
    tensor, except those inside a FloatFunctional."""
    functionals = [module for module in model.modules() if isinstance(module, FloatFunctional)]
    placeholders = {functional.activation_post_process for functional in functionals}
    for module in model.modules():
        if type(module) is nn.Identity and module not in placeholders:
            module.forward = _alias  # type: ignore[method-assign]


def _alias(input: Any) -> Any:
    return pytree.tree_map_only(Tensor, torch.ops.aten.alias.default, input)
