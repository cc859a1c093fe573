"""Numbers that know which sizes they were computed from, and on which line of the user."""

from __future__ import annotations

import dis
import functools
import linecache
import math
import operator
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, Protocol

import torch
from torch import SymBool, SymFloat, SymInt, Tensor
from torch.fx import Node

from torchq_compat.support.graph_nodes import tensors_in
from torchq_compat.support.upstream import pytree

# Numbers that know which sizes they were computed from.
#
# While a model is captured, a size that its Python reads is a ``torch.SymInt`` around a ``Followed``: it
# has the value of the example, and the expression of sizes that it was computed by. Arithmetic makes
# others. Where Python asks for the value itself, for a branch, a loop or an index, that is recorded as a
# guard: from there on the graph is right only at sizes for which the expression has that value.


NUMBERS = (SymInt, SymFloat, SymBool)


@dataclass(frozen=True)
class Operation:
    """A function of numbers.

    Attributes:
        function: the function, which takes plain numbers and runs in a graph.
        words: its call as Python code, with ``{}`` for each operand.
        keeps_integers: whether integers make integers.
    """

    function: Callable[..., Any]
    words: str
    keeps_integers: bool = False


#: The methods that torch calls on the node of a number -> what they compute.
OPERATIONS = {
    "add": Operation(operator.add, "({} + {})", True),
    "sub": Operation(operator.sub, "({} - {})", True),
    "mul": Operation(operator.mul, "({} * {})", True),
    **{name: Operation(operator.floordiv, "({} // {})", True) for name in ("floordiv", "int_floordiv")},
    **{
        name: Operation(operator.truediv, "({} / {})") for name in ("truediv", "int_truediv", "float_truediv")
    },
    **{name: Operation(operator.pow, "({} ** {})") for name in ("pow", "pow_by_natural", "float_pow")},
    "mod": Operation(operator.mod, "({} % {})", True),
    "neg": Operation(operator.neg, "(-{})", True),
    "pos": Operation(operator.pos, "{}"),
    "lshift": Operation(operator.lshift, "({} << {})"),
    "rshift": Operation(operator.rshift, "({} >> {})"),
    "bitwise_and": Operation(operator.and_, "({} & {})"),
    "bitwise_or": Operation(operator.or_, "({} | {})"),
    "bitwise_xor": Operation(operator.xor, "({} ^ {})"),
    "eq": Operation(operator.eq, "({} == {})"),
    "ne": Operation(operator.ne, "({} != {})"),
    "lt": Operation(operator.lt, "({} < {})"),
    "le": Operation(operator.le, "({} <= {})"),
    "gt": Operation(operator.gt, "({} > {})"),
    "ge": Operation(operator.ge, "({} >= {})"),
    "sym_min": Operation(torch.sym_min, "min({}, {})", True),
    "sym_max": Operation(torch.sym_max, "max({}, {})", True),
    "ceil": Operation(math.ceil, "math.ceil({})", True),
    "floor": Operation(math.floor, "math.floor({})", True),
    "trunc": Operation(math.trunc, "math.trunc({})", True),
    "round": Operation(round, "round({}, {})"),
    "abs": Operation(abs, "abs({})"),
    "sym_float": Operation(torch.sym_float, "float({})"),
    "sym_sqrt": Operation(torch.sym_sqrt, "math.sqrt({})"),
}
#: What ``round`` computes without a number of digits.
ROUND_TO_INTEGER = Operation(round, "round({})", True)


#: An operation -> one of its names; those that stand for other code have none.
NAMES = {operation: name for name, operation in OPERATIONS.items()}


@dataclass(frozen=True)
class Size:
    """The size of dimension ``dim`` of the tensor that ``node`` of a graph computes; None if no node does. If
    ``dim`` is None, how many dimensions it has."""

    node: Any
    dim: int | None

    @property
    def value(self) -> int:
        """Its value in the trace."""
        return int(size_of(self.node.meta["val"], self.dim))


def size_of(tensor: Tensor, dim: int | None) -> Any:
    """Return the size of a dimension of ``tensor``, or how many it has; see ``Size``."""
    return tensor.dim() if dim is None else tensor.shape[dim]


@dataclass(frozen=True)
class Computed:
    """A number computed from others, each a ``Size``, a ``Computed`` or a plain number."""

    operation: Operation
    operands: tuple[Any, ...]


def sizes_in(expression: Any) -> Iterator[Size]:
    """Yield the sizes that ``expression`` is computed from."""
    if isinstance(expression, Size):
        yield expression
    elif isinstance(expression, Computed):
        for operand in expression.operands:
            yield from sizes_in(operand)


def map_sizes(expression: Any, function: Callable[[Size], Any]) -> Any:
    """Return ``expression`` with ``function`` of each size in its place."""
    if isinstance(expression, Size):
        return function(expression)
    if isinstance(expression, Computed):
        operands = (map_sizes(operand, function) for operand in expression.operands)
        return Computed(expression.operation, tuple(operands))
    return expression


def in_terms_of(expression: Any, nodes: Mapping[Any, Any]) -> Any:
    """Return ``expression`` with the sizes of other ``nodes``."""
    return map_sizes(expression, lambda size: Size(nodes.get(size.node, size.node), size.dim))


#: What leaves a number as it is, as its second operand; and the values of operations on equal numbers.
NEUTRAL = {"add": 0, "sub": 0, "mul": 1}
OF_EQUALS = {"sub": 0, "eq": True, "le": True, "ge": True, "ne": False, "lt": False, "gt": False}


def simplified(expression: Any) -> Any:
    """Return ``expression`` without what changes nothing: ``n + 0``, ``n - n``, comparisons of n with n."""
    if not isinstance(expression, Computed):
        return expression
    first, *others = operands = tuple(map(simplified, expression.operands))
    operation = expression.operation
    if not any(isinstance(operand, (Size, Computed)) for operand in operands):
        return operation.function(*operands)
    name = NAMES.get(operation, "")
    if name == "lt" and isinstance(first, Size) and type(others[0]) is int and others[0] <= 0:
        return False
    if others == [first] and name in OF_EQUALS:
        return OF_EQUALS[name]
    if name in NEUTRAL and others == [NEUTRAL[name]]:
        return first
    if name in ("add", "mul") and first == NEUTRAL[name]:
        return others[0]
    return Computed(operation, operands)


def as_code(expression: Any, names: Mapping[Size, str]) -> str:
    """Return ``expression`` as Python code in which each size is called as in ``names``."""
    if isinstance(expression, Size):
        return names[expression]
    if not isinstance(expression, Computed):
        return repr(expression)
    return expression.operation.words.format(*(as_code(operand, names) for operand in expression.operands))


#: What is true if the comparison is false.
OPPOSITES = {"eq": "ne", "ne": "eq", "lt": "ge", "ge": "lt", "gt": "le", "le": "gt"}


def condition_of(expression: Any, value: Any, names: Mapping[Size, str]) -> str:
    """Return Python code that is true where ``expression`` has ``value``."""
    code = as_code(expression, names)
    if not isinstance(value, bool):
        return f"{code} == {value!r}"
    if not value and isinstance(expression, Computed):
        other = OPPOSITES.get(NAMES.get(expression.operation, ""))
        if other is None:
            return f"not {code}"
        code = as_code(Computed(OPERATIONS[other], expression.operands), names)
    is_comparison = isinstance(expression, Computed) and expression.operation.words.startswith("({} ")
    return code[1:-1] if is_comparison else code


class DependsOnValuesError(Exception):
    """Python computes with a size and a number that depends on values, such as the greatest of lengths:
    torch.export has symbols for both."""


class Followed:
    """The node of a ``torch.SymInt``, ``SymFloat`` or ``SymBool``; see the module.

    The names of its methods are those that torch calls.
    """

    constant: ClassVar[None] = None
    _hint = property(lambda self: self.value)
    hint = property(lambda self: self.value)

    def __init__(self, guards: Guards, value: Any, expression: Any) -> None:
        self.guards, self.value, self.expression = guards, value, expression

    def guard(self, *_: Any) -> Any:
        """Return the value, which Python asks for."""
        self.guards(self.expression, self.value)
        return self.value

    guard_int = guard_bool = guard_float = guard_size_oblivious = guard_or_false = guard_or_true = guard
    expect_true = bool_ = int_ = float_ = statically_known_true = guard

    @property
    def expr(self) -> Any:
        """Raise: a symbol of torch asks for it to compute with this number."""
        raise DependsOnValuesError

    def require_hint(self, *_: Any) -> Any:
        return self.value

    def expect_size(self, *_: Any) -> bool:
        return True

    def clone(self) -> Followed:
        return self

    def is_int(self) -> bool:
        return type(self.value) is int

    def is_float(self) -> bool:
        return type(self.value) is float

    def is_bool(self) -> bool:
        return type(self.value) is bool

    def is_nested_int(self) -> bool:
        return False

    # What Python compares is answered at once: operators of torch take no symbols of truth, and one may be
    # left over, as in ``is_causal = length > 1 and mask is None``.
    is_constant = is_bool

    def is_symbolic(self) -> bool:
        return True

    has_hint = is_symbolic

    def maybe_as_int(self) -> None:
        return None

    maybe_as_float = maybe_as_bool = maybe_as_int

    def wrap_int(self, value: Any) -> Followed:
        return Followed(self.guards, value, value)

    wrap_float = wrap_bool = wrap_int

    def __str__(self) -> str:
        return f"{self.value}~"

    _graph_repr = __str__

    def round(self, digits: int | None = None) -> Followed:
        """Return the number rounded to ``digits``, or to an integer."""
        if digits is None:
            return self._computed(ROUND_TO_INTEGER)
        return self._computed(OPERATIONS["round"], digits)

    def __getattr__(self, name: str) -> Any:
        if name == "str":
            return self.__str__
        if name not in OPERATIONS:
            raise AttributeError(name)
        return functools.partial(self._computed, OPERATIONS[name])

    def _computed(self, operation: Operation, *others: Any) -> Followed:
        if not all(isinstance(other, (Followed, int, float)) for other in others):
            raise DependsOnValuesError
        values = [other.value if isinstance(other, Followed) else other for other in others]
        expressions = [other.expression if isinstance(other, Followed) else other for other in others]
        result = _in_integers(Computed(operation, (self.expression, *expressions)))
        return Followed(self.guards, operation.function(self.value, *values), result)


def _in_integers(computed: Computed) -> Computed:
    """Return ``computed``, a rounded quotient of integers in integers: torch cannot save ``math.ceil``."""
    quotient = computed.operands[0]
    rounds = computed.operation in (OPERATIONS["ceil"], OPERATIONS["floor"])
    if not rounds or not isinstance(quotient, Computed) or quotient.operation != OPERATIONS["truediv"]:
        return computed
    over, under = quotient.operands
    if not _is_integer(over) or not isinstance(under, int) or under <= 0:
        return computed
    if computed.operation == OPERATIONS["ceil"]:
        # Not -(-over // under): ONNX rounds the quotients of negative numbers upwards.
        over = Computed(OPERATIONS["add"], (over, under - 1))
    return Computed(OPERATIONS["floordiv"], (over, under))


def _is_integer(expression: Any) -> bool:
    if not isinstance(expression, Computed):
        return isinstance(expression, (int, Size))
    return expression.operation.keeps_integers and all(map(_is_integer, expression.operands))


#: Is told each expression, with its value, that Python asks for.
Guards = Callable[[Any, Any], None]


class FollowedInt(SymInt):
    """A size as it is read. Unlike other numbers of torch it can be a key of a dict."""

    def __init__(self, node: Followed) -> None:
        super().__init__(node)  # type: ignore[no-untyped-call]

    def __hash__(self) -> int:
        return hash(int(self))


def followed(guards: Guards, value: int, node: Node, dim: int) -> SymInt:
    """Return the size ``value`` of dimension ``dim`` of the tensor that ``node`` computes."""
    return FollowedInt(Followed(guards, value, Size(node, dim)))


def is_followed(value: Any) -> bool:
    """Return whether ``value`` is a number that knows its sizes, not one of torch's own symbols."""
    return isinstance(value, NUMBERS) and isinstance(value.node, Followed)


def plain(leaf: Any) -> Any:
    """Return the plain number of a followed one, and anything else as it is."""
    return leaf.node.value if is_followed(leaf) else leaf


# The user's line that runs: the place in code that a guard on sizes is told with.


TORCH = Path(torch.__file__).parent
PACKAGE = Path(__file__).parents[2]
STANDARD, PACKAGES = (f"{sysconfig.get_path(name)}/" for name in ("stdlib", "purelib"))
LIBRARIES = (f"{TORCH}/", f"{PACKAGE}/")
CALLED_IN_BETWEEN = ("unseen_python", "replaced_calls", "packed_sequences")
#: Code that evaluates numbers, and does not decide by them.
EVALUATING = (
    str(TORCH / "fx" / "experimental"),
    str(TORCH / "__init__.py"),
    str(TORCH / "_tensor.py"),
    str(TORCH / "overrides.py"),
    str(Path(__file__).parent),
    *(str(PACKAGE / "capture" / f"{name}.py") for name in CALLED_IN_BETWEEN),
)
#: Beginnings of the file names of generated code.
GENERATED = ("<frozen", "<eval_with_key", "<string>")
#: The frame that captures: what called it is not the model's code.
EXPORT = str(PACKAGE / "capture" / "torch_export.py")


@dataclass(frozen=True)
class CodePlace:
    """A place in code.

    Attributes:
        line: file, line and text of the user's code; None if it is unknown.
        by_user: whether the user's own Python asked, and not a module or function of torch or this package,
            which checks its arguments.
    """

    line: str | None = None
    by_user: bool = False


def place_in_code() -> CodePlace:
    """Return the innermost line that runs and belongs neither to torch, nor to this package or Python."""
    frame = sys._getframe(1)
    asking = next((f for f in frames(frame) if not f.f_code.co_filename.startswith(EVALUATING)), None)
    by_user = asking is not None and not is_of_libraries(asking.f_code.co_filename)
    for user in users_frames(frame):
        return CodePlace(line_in_code(user.f_code.co_filename, user.f_lineno), by_user)
    return CodePlace()


def line_in_code(path: str, number: int) -> str:
    """Return file, line and text of a place in code."""
    return f"{Path(path).name}:{number} ({linecache.getline(path, number).strip()})"


def stack_in_code() -> str:
    """Return the lines of the user's code that run, the innermost last, in the form of a stack trace."""
    lines = list[str]()
    for frame in users_frames(sys._getframe(1)):
        path, number = frame.f_code.co_filename, frame.f_lineno
        text = linecache.getline(path, number).strip()
        lines.append(f'File "{path}", line {number}, in {frame.f_code.co_name}\n    {text}')
    return "\n  ".join(reversed(lines))


def frames(frame: FrameType | None, end: str = EXPORT) -> Iterator[FrameType]:
    """Yield ``frame`` and the frames around it, up to that of the file ``end``: those inside of an export."""
    while frame is not None and frame.f_code.co_filename != end:
        yield frame
        frame = frame.f_back


def users_frames(frame: FrameType | None, end: str = EXPORT) -> Iterator[FrameType]:
    """Yield those of the ``frames`` that belong neither to torch, nor to this package or Python."""
    return (item for item in frames(frame, end) if is_users(item.f_code.co_filename))


def asserted_value(frame: FrameType | None) -> bool | None:
    """Return a truth value with which an ``assert`` of ``frame`` that asks for it goes on, or None."""
    code = [] if frame is None else list(dis.get_instructions(frame.f_code))
    offsets = {instruction.offset: index for index, instruction in enumerate(code)}
    at = offsets.get(-1 if frame is None else frame.f_lasti, len(code))
    at += [item.opname for item in code[at : at + 1]] == ["TO_BOOL"]
    names = [item.opname for item in code]
    fails = next((index for index in range(at, len(code)) if names[index] == "LOAD_ASSERTION_ERROR"), None)
    if (
        fails is None
        or not names[at].endswith(("IF_TRUE", "IF_FALSE"))
        or _start(code[at]) < _start(code[fails])
    ):
        return None
    jumps_if, target = names[at].endswith("IF_TRUE"), offsets.get(code[at].argval)
    goes_on = names.index("RAISE_VARARGS", fails) + 1
    # A jump to elsewhere skips a part of the condition, in which what is not skipped decides.
    return jumps_if if target == goes_on else not jumps_if


def _start(instruction: dis.Instruction) -> tuple[int, int]:
    place = instruction.positions
    return (0, 0) if place is None else (place.lineno or 0, place.col_offset or 0)


@functools.cache
def is_of_libraries(path: str) -> bool:
    """Return whether the file at ``path`` belongs to torch, this package or Python."""
    return path.startswith(LIBRARIES) or (path.startswith(STANDARD) and not path.startswith(PACKAGES))


@functools.cache
def is_users(path: str) -> bool:
    """Return whether the file at ``path`` is the user's, and no generated code."""
    return not path.startswith(GENERATED) and not is_of_libraries(path)


# Finds where sizes come from that are computed outside of the trace, as those of a custom module's results.
#
# A function is called once more with a followed size replaced by a prime that no model has by chance: what
# becomes the prime in its results is that size, and what does not change is a constant.


PRIME = 9973
#: A size that a function outside of the trace computes in another way.
UNKNOWN = Size(None, 0)


class KnowsSizes(Protocol):
    """What answers reads of sizes."""

    def sizes(self, tensor: Tensor) -> tuple[Any, ...]: ...

    def remember(self, tensor: Tensor, sizes: tuple[Any, ...]) -> None: ...

    def guard(self, expression: Any, value: Any) -> None: ...


def called_aside(reads: KnowsSizes, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call ``function`` on plain numbers, and let ``reads`` remember the sizes of what it makes."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    plain_args, plain_kwargs = pytree.tree_unflatten([plain(leaf) for leaf in leaves], spec)
    result = function(*plain_args, **plain_kwargs)
    built, sizes = tensors_in(result), _followed_in(reads, leaves)
    if not sizes or not built or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None:
        return result
    match = [list[Any](tensor.shape) for tensor in built]
    slopes: dict[tuple[int, int], set[float]] = {}
    for size in sizes.values():
        # A function may want equal sizes to stay equal.
        alike = [item for item, other in sizes.items() if other.node.value == size.node.value]
        for changed in ([size.node.expression], alike):
            marked = pytree.tree_unflatten([_marked(reads, leaf, changed) for leaf in leaves], spec)
            try:
                others = tensors_in(function(*marked[0], **marked[1]))
            except Exception:  # It wants these sizes to be as they are.
                continue
            for place, dim, before, after in _changes(built, others):
                known, slope = match[place][dim], (after - before) / (PRIME - size.node.value)
                if is_followed(known) and changed is alike:
                    continue
                slopes.setdefault((place, dim), set()).add(slope)
                if slopes[place, dim] != {1.0} and (
                    is_followed(known) or slope != int(slope) or abs(slope) >= PRIME
                ):
                    match[place][dim] = FollowedInt(Followed(reads.guard, before, UNKNOWN))
                elif is_followed(known):  # What ``cat`` returns grows with each of its parts.
                    match[place][dim] = known + (size - size.node.value)
                else:
                    is_same = slope == 1.0 and before == size.node.value
                    match[place][dim] = size if is_same else int(slope) * (size - size.node.value) + before
            break
    for tensor, own in zip(built, match, strict=True):
        if not any(tensor is leaf for leaf in leaves):  # An argument's sizes would be read from themselves.
            reads.remember(tensor, tuple(own))
    return result


def _followed_in(reads: KnowsSizes, leaves: Sequence[Any]) -> dict[Any, Any]:
    """Return expression -> size, for the sizes among ``leaves`` and of the tensors among them."""
    sizes: list[Any] = []
    for leaf in leaves:
        sizes.extend(reads.sizes(leaf) if isinstance(leaf, Tensor) else [leaf])
    return {size.node.expression: size for size in sizes if is_followed(size)}


def _marked(reads: KnowsSizes, leaf: Any, changed: Sequence[Any]) -> Any:
    """Return ``leaf`` with the prime in place of the sizes whose expression is one of ``changed``."""

    def marked(size: Any) -> Any:
        return PRIME if is_followed(size) and size.node.expression in changed else plain(size)

    if not isinstance(leaf, Tensor):
        return marked(leaf)
    shape = [marked(size) for size in reads.sizes(leaf)]
    if not any(type(size) is int and size == PRIME for size in shape):
        return leaf
    return torch.empty(shape, dtype=leaf.dtype, device=leaf.device)


def _changes(result: Sequence[Tensor], others: Sequence[Tensor]) -> Iterator[tuple[int, int, int, int]]:
    """Yield the number of the tensor, the dimension and both sizes, of each size that is another one."""
    for place, (tensor, other) in enumerate(zip(result, others, strict=False)):
        for dim, (before, after) in enumerate(zip(tensor.shape, other.shape, strict=False)):
            # A size that depends on values is a symbol of torch.
            if type(before) is type(after) is int and before != after:
                yield place, dim, before, after
