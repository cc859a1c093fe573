"""Models with random nested structures as arguments and results, through prepare and convert."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

import torchq_compat as tc
from tests.fuzz.outcomes import Case
from tests.helpers.histograms import coarse_qconfig_mapping
from tests.helpers.oracle import sqnr

__all__ = ["cases", "one_structure"]

WIDTH = 4
MAPPING = coarse_qconfig_mapping("x86")


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclass
class Registered:
    a: Any
    b: Any


torch.export.register_dataclass(Registered, serialized_type_name="torchq_compat.tests.fuzz.Registered")

MAKERS: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "list": list,
    "dict": lambda values: {f"k{i}": value for i, value in enumerate(values)},
    "ordered": lambda values: OrderedDict((f"k{i}", value) for i, value in enumerate(reversed(values))),
    "pair": lambda values: Pair(values[0], values[-1]),
    "registered": lambda values: Registered(values[0], values[-1]),
}
#: None for a tensor, "none" for the value None, otherwise (kind, shapes inside).
Shape = Any


def random_shape(rng: random.Random, depth: int) -> Shape:
    if depth == 0 or rng.random() < 0.3:
        return "none" if rng.random() < 0.15 else None
    kind = rng.choice(list(MAKERS))
    return kind, [random_shape(rng, depth - 1) for _ in range(rng.randint(1, 3))]


def build(shape: Shape, leaf: Callable[[], Tensor]) -> Any:
    if shape is None:
        return leaf()
    if shape == "none":
        return None
    kind, inner = shape
    return MAKERS[kind]([build(each, leaf) for each in inner])


class Restructures(nn.Module):
    """A model of ``arguments`` structures to one of ``result``; every tensor goes through the linear."""

    def __init__(self, result: Shape) -> None:
        super().__init__()
        self.result = result
        self.linear = nn.Linear(WIDTH, WIDTH)

    def _mix(self, *structures: Any) -> Any:
        tensors = [each for each in pytree.tree_leaves(structures) if isinstance(each, Tensor)]
        mixed = [self.linear(tensor) for tensor in tensors]
        total = mixed[0]
        for each in mixed[1:]:
            total = total + each
        factors = iter(range(1, 100))
        return build(self.result, lambda: total * (1.0 / next(factors)))


class One(Restructures):
    def forward(self, first: Any) -> Any:
        return self._mix(first)


class Two(Restructures):
    def forward(self, first: Any, second: Any) -> Any:
        return self._mix(first, second)


def one_structure(seed: int) -> None:
    """Prepare and convert one model; check the structure of the results and, to 8 bits, their values."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    model_class, count = rng.choice(((One, 1), (Two, 2)))
    model = model_class(random_shape(rng, 3)).eval()
    shapes = [("tuple", [None, random_shape(rng, 3)]), *(random_shape(rng, 2) for _ in range(count - 1))]
    args = tuple(build(shape, lambda: torch.randn(5, WIDTH)) for shape in shapes)
    expected = model(*args)
    prepared = tc.prepare_fx(model, MAPPING, args)
    check_same(expected, prepared(*args), bits_lost=False)
    for convert in (tc.convert_to_reference_fx, tc.convert_fx):
        check_same(expected, convert(prepared)(*args), bits_lost=True)


def check_same(expected: Any, found: Any, *, bits_lost: bool) -> None:
    wanted, structure = pytree.tree_flatten(expected)
    values, found_structure = pytree.tree_flatten(found)
    assert found_structure == structure, f"{found_structure} instead of {structure}"
    for want, value in zip(wanted, values, strict=True):
        if want is None:
            assert value is None
            continue
        noise = sqnr(want.detach(), value.detach())
        assert noise > (15 if bits_lost else 100), f"{noise:.1f} dB"


def cases(count: int, seed: int = 0) -> Iterator[Case]:
    """Yield ``count`` cases, each of which has to succeed."""
    for number in range(seed, seed + count):
        yield Case(f"structure {number}", partial(one_structure, number), accepted="it works")
