"""Drop guards of an exported program against sizes of 1: torch adds them where an operator reads strides.

The model's own requirements on its sizes are checked by ``check_sizes`` in the program, with the same
messages. A guard is dropped if the model accepts the sizes that the guard refuses, and if the program, run at
these sizes, gives the bits of the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.export import ExportedProgram

from torchq_compat.capture.checked.trial_inputs import SizeGroups, sizes_at, with_sizes
from torchq_compat.capture.checked.trial_runs import kept_buffers
from torchq_compat.graph.graph_module import ConvertedGraphModule
from torchq_compat.sizes.find_sizes import Group, group_of
from torchq_compat.sizes.input_sizes import Dimension
from torchq_compat.support.upstream import guards_of, pytree

__all__ = ["drop_guards_of_ones"]

#: ``L['x'].size()[0]``, as a guard names a size.
SIZE = re.compile(r"L(?:\[[^\]]+\]|\.\w+)+\.size\(\)\[\d+\]")
FACTOR = rf"(?:\d+|{SIZE.pattern})"
#: A product of sizes and numbers, and the number that it must not be, or must exceed.
NOT_PRODUCT = re.compile(rf"\(*(?P<product>{FACTOR}(?:\*{FACTOR})*)\)* (?:!=|>) (?P<number>\d+)")


def drop_guards_of_ones(program: ExportedProgram, model: ConvertedGraphModule, args: tuple[Any, ...]) -> None:
    """Drop the guards of ``program`` that refuse only sizes of 1 at which it computes what ``model`` does."""
    guards = guards_of(program)
    calls = _calls_refused(guards, model, args)
    if not calls:
        return
    module = program.module(check_guards=False)
    right: dict[frozenset[Group], bool] = {}
    for guard, groups in calls.items():
        if frozenset(groups) not in right:
            right[frozenset(groups)] = _is_right(module, model, args, groups)
        if right[frozenset(groups)]:
            guards[:] = [other for other in guards if other != guard]


def _calls_refused(
    guards: list[str], model: ConvertedGraphModule, args: tuple[Any, ...]
) -> dict[str, SizeGroups]:
    """Return guard -> the sizes of 1 that it refuses, for guards whose sizes the model accepts."""
    signature = model.record.signature
    dimensions = _by_name_in_guards(signature.sizes.dimensions, signature.labelled(args))
    found = {}
    for guard in guards:
        groups = _ones_refused(guard, dimensions)
        if groups and signature.sizes.broken_rule(sizes_at(signature.sizes, groups)) is None:
            found[guard] = groups
    return found


def _by_name_in_guards(dimensions: Iterable[Dimension], labels: Iterable[str]) -> dict[str, Dimension]:
    """Return name in guards -> dimension; a streaming program takes ``*args``, named by their positions."""
    positions = list(dict.fromkeys(label.partition("[")[0] for label in labels))
    found: dict[str, Dimension] = {}
    for dimension in dimensions:
        name, bracket, rest = dimension.label.partition("[")
        for root in (f"['{name}']", f"['args'][{positions.index(name)}]"):
            found[f"L{root}{bracket}{rest}.size()[{dimension.index}]"] = dimension
    return found


def _ones_refused(guard: str, dimensions: Mapping[str, Dimension]) -> SizeGroups:
    """Return the sizes of 1 that ``guard`` refuses, if it only says that a product of sizes is not its value
    at sizes of 1; return no sizes for any other guard."""
    found = NOT_PRODUCT.fullmatch(guard)
    sizes = SIZE.findall(guard)
    if found is None or not sizes or not all(size in dimensions for size in sizes):
        return {}
    factors = [int(number) for number in SIZE.sub("1", found["product"]).split("*")]
    if torch.Size(factors).numel() != int(found["number"]):
        return {}
    return {group_of(dimensions[size]): 1 for size in sizes}


def _is_right(
    module: torch.nn.Module, model: ConvertedGraphModule, args: tuple[Any, ...], groups: SizeGroups
) -> bool:
    signature = model.record.signature
    values = sizes_at(signature.sizes, groups)
    # The other sizes stay as in ``args``: a streaming program accepts only its own batch size.
    changed = {
        dimension.place: values[dimension.place]
        for dimension in signature.sizes.dimensions
        if values[dimension.place] != dimension.example
    }
    call = with_sizes(args, signature.labelled(args), changed)
    try:
        # A streaming program writes to its states.
        with torch.no_grad(), kept_buffers(module):
            return _same_bits(model(*call), module(*call))
    except Exception:
        # A kernel refuses what the guard refused: keep the guard, which names the size.
        return False


def _same_bits(expected: Any, found: Any) -> bool:
    pairs = zip(pytree.tree_leaves(expected), pytree.tree_leaves(found), strict=True)
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs if isinstance(a, torch.Tensor))
