"""The shapes of the results of a user's module: by fake tensors, or by calls with values."""

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchq_compat.capture.call_layouts import Structure, input_labels
from torchq_compat.capture.opaque_stub import FakeCall
from torchq_compat.capture.sizes.numbers import is_followed
from torchq_compat.errors import CustomModuleError, TorchQCompatError
from torchq_compat.modules.registry import Parent, handlers
from torchq_compat.support.graph_nodes import copied_model
from torchq_compat.support.process_state import alone, draws_kept, own_attribute
from torchq_compat.support.upstream import detect_fake_mode, disable_current_modes

# Finds the shapes of a module's results if fake tensors fail: the module branches on data, or leaves torch.
#
# The module is run twice on real tensors, the second time with other sizes. A size of a result is taken to
# be the size of an input that it equals both times, or else a constant. Sizes that the module does not
# accept otherwise are fixed, and those that it accepts only if they are equal stay equal.


def probe(module: nn.Module, path: str, args: Any, kwargs: Any) -> Any:
    """Return empty tensors of the shapes and dtypes of ``module(*args, **kwargs)``, in the same structure.

    Raises:
        CustomModuleError: if the module fails on example data, or its shapes depend on the data.
    """
    inputs, tensors, sizes = Structure.take_apart_with_sizes((args, kwargs))
    call = _Call(module, path, inputs, tensors, sizes, [tuple(tensor.shape) for tensor in tensors])
    outputs, first = call.run({}, torch.zeros)
    moves, (other_outputs, second) = _move_sizes(call)
    if outputs != other_outputs:
        raise _shapes_depend_on_data(path, type(module))
    _keep_equal(call.followed, moves)
    results = []
    for one, other in zip(first, second, strict=True):
        if one.dim() != other.dim() or one.dtype != other.dtype:
            raise _shapes_depend_on_data(path, type(module))
        pairs = zip(one.shape, other.shape, strict=True)
        shape = [_size(pair, call, moves) for pair in pairs]
        results.append(call.tensors[0].new_empty(shape, dtype=one.dtype))
    return outputs.put_together(results)


#: Expression of a size -> the value it has in place of that of the example.
Moves = dict[Any, int]


#: The structure of the results of a run, and the tensors in them.
_Run = tuple[Structure, list[Tensor]]


@dataclass(frozen=True)
class _Call:
    module: nn.Module
    path: str
    inputs: Structure
    tensors: list[Tensor]
    sizes: list[Any]
    shapes: list[tuple[Any, ...]]

    @property
    def followed(self) -> list[torch.SymInt]:
        """The sizes that the call is given and that are no constants."""
        return [size for size in (*itertools.chain(*self.shapes), *self.sizes) if is_followed(size)]

    def run(self, moves: Moves, fill: Callable[..., Tensor] = torch.ones) -> _Run:
        """Run the module on real tensors at the sizes of the example, but for ``moves``."""
        # Inside torch.export every new tensor would be fake.
        with disable_current_modes():
            real = [
                fill([_value(size, moves) for size in shape], dtype=t.dtype, device=t.device)
                for t, shape in zip(self.tensors, self.shapes, strict=True)
            ]
            args, kwargs = self.inputs.put_together(real, [_value(size, moves) for size in self.sizes])
            try:
                with alone(), draws_kept(), torch.no_grad():
                    return Structure.take_apart(copied_model(self.module)(*args, **kwargs))
            except Exception as cause:
                kind = type(self.module).__name__
                raise CustomModuleError.of(
                    "TQ942.shapes_unknown", kind=kind, path=self.path, cause=cause
                ) from cause

    def accepts(self, moves: Moves) -> bool:
        try:
            self.run(moves)
        except CustomModuleError:
            return False
        return True


def _move_sizes(call: _Call) -> tuple[Moves, _Run]:
    """Return other values of the sizes that the module accepts, as many as can be found, and its run on
    them: each size on its own value; else those with equal values together."""
    moves: Moves = {}
    for size in call.followed:
        moves.setdefault(size.node.expression, 2 * size.node.value + 1 + len(moves))
    example = {size.node.expression: size.node.value for size in call.followed}
    try:
        return moves, call.run(moves)
    except CustomModuleError as refused:
        alone = {size: value for size, value in moves.items() if call.accepts({size: value})}
        together: Moves = {}
        for value in set(example.values()):
            alike = [size for size in moves if size not in alone and example[size] == value]
            group = dict.fromkeys(alike, moves[alike[0]]) if len(alike) > 1 else {}
            together |= group if group and call.accepts(group) else {}
        accepted = {**alone, **together}
        if not accepted:
            raise
        try:
            return accepted, call.run(accepted)
        except CustomModuleError:
            raise refused from None


def _keep_equal(followed: list[torch.SymInt], moves: Moves) -> None:
    """Let the captured graph accept no other sizes than the module does."""
    moved: dict[int, torch.SymInt] = {}
    for size in followed:
        if size.node.expression not in moves:
            int(size)  # fixes it
        else:
            first = moved.setdefault(moves[size.node.expression], size)
            bool(first == size)  # a guard


def _value(size: Any, moves: Moves) -> int:
    """Return the value of ``size`` with ``moves``."""
    return moves.get(size.node.expression, size.node.value) if is_followed(size) else int(size)


def _size(pair: tuple[int, int], call: _Call, moves: Moves) -> Any:
    for size in call.followed:
        if (_value(size, {}), _value(size, moves)) == pair:
            return size
    if pair[0] != pair[1]:
        raise _shapes_depend_on_data(call.path, type(call.module))
    return pair[0]


def _shapes_depend_on_data(path: str, cls: type) -> CustomModuleError:
    return CustomModuleError.of("TQ942.shapes_depend_on_data", kind=cls.__name__, path=path)


# Computes the shapes of a module's results by running it on fake tensors.


def fake_call_of(module: nn.Module, path: str) -> FakeCall:
    """Return a function that runs ``module`` on fake tensors; its parameters may be real.

    Submodules that a handler keeps opaque, such as recurrent modules, are replaced by the handler's fake
    calls. A module that needs data is run on example data; see ``probed_shapes``.

    Raises:
        CustomModuleError: on the call, if no shapes can be found, or the module writes to an input.
    """
    # During torch.export the module itself has fake parameters, and its calls are recorded.
    real = copied_model(module)
    if is_users_own(module):
        # On fake tensors torch writes its recurrent operator out, for as many steps as are tried.
        return lambda *args, **kwargs: probe(real, path, args, kwargs)
    faked = _with_fake_calls_inside(real, path)

    @functools.cache
    def on_meta() -> nn.Module:
        return copied_model(faked).to("meta")

    def fake(*args: Any, **kwargs: Any) -> Any:
        inputs, tensors = Structure.take_apart((args, kwargs))
        versions = [tensor._version for tensor in tensors]
        try:
            with alone(), draws_kept(), _real_parameters_allowed(tensors):
                result = (on_meta() if tensors and tensors[0].is_meta else faked)(*args, **kwargs)
        except TorchQCompatError:
            raise
        except Exception:
            return probe(real, path, args, kwargs)
        for label, tensor, version in zip(input_labels(type(module), inputs), tensors, versions, strict=True):
            if tensor._version != version:
                raise CustomModuleError.of("TQ942.changes_input", path=path, label=label)
        return result

    return fake


class FakeCaller(Parent):
    """Replaces a module whose handler computes its shapes."""

    def __init__(self, original: nn.Module, fake_call: FakeCall) -> None:
        super().__init__(original)
        self.fake_call = fake_call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.fake_call(*args, **kwargs)


def _with_fake_calls_inside(module: nn.Module, path: str) -> nn.Module:
    """Return a copy of ``module`` with opaque submodules replaced; ``module`` itself if there are none."""
    known: dict[str, Callable[[nn.Module, str], FakeCall]] = {}
    for name, child in module.named_modules():
        handler = next((h for h in handlers() if h.is_opaque(child)), None)
        if name and (handler is not None or is_users_own(child)):
            known[name] = fake_call_of if handler is None else handler.fake_call
    if not known:
        return module
    copied = copied_model(module)
    for name, fake_call in known.items():
        child = copied.get_submodule(name)
        copied.set_submodule(name, FakeCaller(child, fake_call(child, f"{path}.{name}")))
    return copied


def is_users_own(module: nn.Module) -> bool:
    """Return whether ``module`` is user code on a class of a handler; see ``CustomModuleHandler``."""
    return any(handler.is_users_own(module) for handler in handlers())


@contextmanager
def _real_parameters_allowed(tensors: list[Tensor]) -> Iterator[None]:
    mode = detect_fake_mode(tensors)
    if mode is None:
        yield
        return
    # A branch on data creates an unbacked symbol, whose value only data would give.
    unbacked = nullcontext() if mode.shape_env is None else mode.shape_env.ignore_fresh_unbacked_symbols()
    with own_attribute(mode, "allow_non_fake_inputs", True), unbacked:
        yield
