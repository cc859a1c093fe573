"""The sizes of a graph that torch.export captured with the user's ``dynamic_shapes``."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import SymInt, Tensor
from torch.fx import GraphModule

from torchq_compat.sizes.input_sizes import Dimension, InputSizes, Place, SizeRule

__all__ = ["sizes_of_symbols"]

#: ``L['x'].size()[0]``, as a guard of torch.export names a size.
SIZE = re.compile(r"L\['(?P<name>\w+)'\](?P<path>(?:\[[^\]]+\]|\.\w+)*)\.size\(\)\[(?P<dim>\d+)\]")


def sizes_of_symbols(
    graph_module: GraphModule, inputs: Mapping[str, Any], conditions: Sequence[str]
) -> InputSizes:
    """Return the sizes of the placeholders of ``graph_module``.

    Args:
        inputs: the example inputs by label.
        conditions: what torch.export assumes of the sizes, as Python code.
    """
    dimensions: list[Dimension] = []
    roots: dict[str, Place] = {}
    specialized: set[Place] = set()
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    for node, (label, example) in zip(placeholders, inputs.items(), strict=True):
        value = node.meta.get("val")
        for index, size in enumerate(value.shape if isinstance(value, Tensor) else ()):
            known = int(example.shape[index])
            if not isinstance(size, SymInt) or size.node.maybe_as_int() is not None:
                dimensions.append(Dimension(label, index, known, is_fixed=True))
                if isinstance(size, SymInt):
                    specialized.add((label, index))
                continue
            root = roots.setdefault(str(size), (label, index))
            dimensions.append(Dimension(label, index, known, None if root == (label, index) else root))
    constants = {label: value for label, value in inputs.items() if not isinstance(value, Tensor)}
    rules = (*_rules_of_dimensions(dimensions, specialized), *_rules_of_conditions(dimensions, conditions))
    return InputSizes(tuple(dimensions), constants, rules)


def _rules_of_dimensions(
    dimensions: Sequence[Dimension], specialized: Collection[Place]
) -> Iterator[SizeRule]:
    numbers = {dimension.place: number for number, dimension in enumerate(dimensions)}
    for number, dimension in enumerate(dimensions):
        if dimension.is_fixed:
            yield SizeRule.fixing(number, dimension, by_python=dimension.place in specialized)
        elif dimension.root is not None:
            other = numbers[dimension.root]
            places = {f"s{number}": dimension.place, f"s{other}": dimension.root}
            words = f"{dimension.name} == {dimensions[other].name}"
            yield SizeRule(f"s{number} == s{other}", places, dimension, words)


def _rules_of_conditions(dimensions: Sequence[Dimension], conditions: Sequence[str]) -> Iterator[SizeRule]:
    numbers = {dimension.place: number for number, dimension in enumerate(dimensions)}
    for condition in conditions:
        found = {
            match[0]: (f"{match['name']}{match['path']}", int(match["dim"]))
            for match in SIZE.finditer(condition)
        }
        if not found or any(place not in numbers for place in found.values()):
            continue
        code, words = condition, condition
        for text, place in found.items():
            code = code.replace(text, f"s{numbers[place]}")
            words = words.replace(text, dimensions[numbers[place]].name)
        places = {f"s{numbers[place]}": place for place in found.values()}
        # torch.export takes sizes to be neither 0 nor 1; its graphs run at these all the same.
        if re.fullmatch(r"s\d+ (?:!= [01]|>= 2|> 1|>= 1|> 0)", code):
            continue
        dimension = dimensions[numbers[next(iter(found.values()))]]
        if dimension.is_fixed and len(found) == 1:
            continue
        yield SizeRule(code, places, dimension, words)
