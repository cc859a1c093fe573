"""Random nested structures into and out of custom modules, and random ways to access them in the model.

Structures are built by code that the model runs, so each of them could come from a user.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.utils._pytree as pytree
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import torchq_compat as tc
from tests.helpers.lstm_flow import uniform
from tests.helpers.oracle import calibrate, leaves, sqnr
from tests.helpers.recurrent_points import sweep, together
from tests.helpers.user_modules import MAPPING, with_weights_of

WIDTH = 4


class Couple(NamedTuple):
    a: Any
    b: Any


@dataclass(frozen=True)
class Frozen:
    a: Any
    b: Any
    note: str = "constant"


@dataclass
class Plain:
    items: Any


#: A shape is None for a tensor, or (kind, shapes inside).
Shape = Any
MAKERS: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "list": list,
    "dict": lambda values: {f"k{i}": value for i, value in enumerate(values)},
    "couple": lambda values: Couple(*values[:2]),
    "frozen": lambda values: Frozen(values[0], values[-1]),
    "plain": Plain,
}
SHAPES = st.recursive(
    st.none(),
    lambda inner: st.tuples(st.sampled_from(tuple(MAKERS)), st.lists(inner, min_size=2, max_size=3)),
    max_leaves=5,
)


def build(shape: Shape, tensors: list[Tensor]) -> Any:
    """Return a structure of ``shape`` around ``tensors``, which are repeated as needed."""
    if shape is None:
        tensors.append(tensors.pop(0))
        return tensors[-1]
    kind, inner = shape
    return MAKERS[kind]([build(each, tensors) for each in inner])


def opened(structure: Any) -> list[Tensor]:
    """Return all tensors of a structure, found without pytree."""
    if isinstance(structure, Tensor):
        return [structure]
    if dataclasses.is_dataclass(structure):
        return opened([getattr(structure, field.name) for field in dataclasses.fields(structure)])
    if isinstance(structure, dict):
        structure = list(structure.values())
    if isinstance(structure, (tuple, list)):
        return [tensor for each in structure for tensor in opened(each)]
    return []


class Restructures(nn.Module):
    """A module that accepts any structure and returns one of ``shape``."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, structure: Any, *, factor: float = 1.0) -> Any:
        tensors = opened(structure)
        mixed = self.linear(sum(tensors) / len(tensors)) * factor
        return build(self.shape, [mixed, *(tensor * 0.5 + mixed for tensor in tensors)])


class ObservedRestructures(Restructures):
    @classmethod
    def from_float(cls, module: Any) -> nn.Module:
        return with_weights_of(cls(module.shape), module)


class QuantizedRestructures(Restructures):
    takes_floats = True

    @classmethod
    def from_observed(cls, module: Any) -> nn.Module:
        return with_weights_of(cls(module.shape), module)


#: What is done with a result: access a part of it, pass it on, discard it.
ACCESSES = (
    "first",
    "last",
    "all",
    "unpack",
    "pass_on",
    "pass_in_a_list",
    "to_lstm",
    "twice",
    "discard",
    "return",
)


class Program(nn.Module):
    """Calls custom modules in a chain and applies ``accesses`` to their results."""

    def __init__(self, shapes: list[Shape], accesses: list[str], given: Shape) -> None:
        super().__init__()
        self.modules_in_order = nn.ModuleList(Restructures(shape) for shape in shapes)
        self.lstm = nn.LSTM(WIDTH, WIDTH)
        self.accesses = accesses
        self.given = given

    def forward(self, x: Tensor, y: Tensor) -> Any:
        value = build(self.given, [x, y])
        kept: list[Any] = []
        for module, access in zip(self.modules_in_order, self.accesses, strict=True):
            if access == "discard":
                module(structure=value)
            else:
                value = self.get(access, module(value, factor=0.8), kept)
        return kept, {"last": opened(value)[0]}

    def get(self, access: str, result: Any, kept: list[Any]) -> Any:
        """Return the input of the next module; ``kept`` is returned at the end."""
        tensors = opened(result)
        if access == "first":
            return tensors[0]
        if access == "last":
            kept.append(tensors[-1])
            return (tensors[-1],)
        if access == "unpack" and isinstance(result, (tuple, list)):
            head, *tail = result
            return {"tail": tail, "head": head}
        if access == "pass_in_a_list":
            return [result, tensors[0]]
        if access == "to_lstm":
            output, state = self.lstm(tensors[0].unsqueeze(0), [t.unsqueeze(0) for t in (tensors[-1],) * 2])
            kept.append(output[0])
            return Couple(output[0], tuple(each[0] for each in state))
        if access == "twice":
            kept.append((tensors[0] + tensors[0], tensors[0]))
            return result
        if access == "return" and not any(kind in str(result) for kind in ("Frozen", "Plain")):
            kept.append(result)
        if access == "all":
            kept.extend(tensors)
        return result


PROGRAMS = st.integers(1, 3).flatmap(
    lambda count: st.tuples(
        st.lists(SHAPES, min_size=count, max_size=count),
        st.lists(st.sampled_from(ACCESSES), min_size=count, max_size=count),
        SHAPES,
        st.integers(0, 2**16),
    )
)
CONFIGS = (
    {
        "float_to_observed_custom_module_class": {
            "static": {Restructures: ObservedRestructures, nn.LSTM: torch.ao.nn.quantizable.LSTM}
        }
    },
    {"observed_to_quantized_custom_module_class": {"static": {ObservedRestructures: QuantizedRestructures}}},
)


def check(program: tuple[list[Shape], list[str], Shape, int]) -> None:
    shapes, accesses, given_shape, seed = program
    torch.manual_seed(seed)
    model = Program(shapes, accesses, given_shape).eval()
    data = [(uniform(1.0, size, WIDTH), uniform(1.0, size, WIDTH)) for size in (5, 32, 17)]
    prepared = tc.prepare_fx(model, MAPPING, data[0], CONFIGS[0])
    calibrate(prepared, data)
    # A module whose results are all unused is removed, so its mapping matches nothing, which is reported.
    nothing_left = set(accesses) == {"discard"}
    converted = tc.convert_fx(prepared, None if nothing_left else CONFIGS[1])
    with torch.no_grad():
        results = [[m(*args) for args in data] for m in (model, prepared, converted)]
    for other in results[1:]:
        for exact, found in zip(results[0], other, strict=True):
            assert pytree.tree_structure(exact) == pytree.tree_structure(found)
            assert [t.shape for t in leaves(exact)] == [t.shape for t in leaves(found)]
    for a, b, c in zip(*map(together, results), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
        if nothing_left:
            assert torch.equal(a, c)
        else:
            assert 25 < sqnr(a, c) < 70


@settings(sweep, max_examples=6)
@given(program=PROGRAMS)
def test_any_structure_and_any_access(program: tuple[list[Shape], list[str], Shape, int]) -> None:
    check(program)


@pytest.mark.slow
@settings(sweep, max_examples=200)
@given(program=PROGRAMS)
def test_any_structure_and_any_access_at_length(program: tuple[list[Shape], list[str], Shape, int]) -> None:
    check(program)
