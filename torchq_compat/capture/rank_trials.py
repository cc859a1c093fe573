"""Finds at which other ranks than the example's the float model computes what it does at the example's."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchq_compat.capture.checked import Attempt, CaptureCase
from torchq_compat.capture.sizes.input_sizes import InputSizes, sizes_of
from torchq_compat.capture.sizes.other_ranks import OtherRank, in_place_of
from torchq_compat.capture.trial_runs import CAPTURED, difference, resized, trial_sizes, with_sizes
from torchq_compat.support.graph_nodes import tensors_in
from torchq_compat.support.upstream import pytree

#: What the sizes of a trial are in place of the one dimension.
NONE, SEVERAL = [()], [(2, 3), (2, 1, 3)]
#: The dimension of a result that is the same at every rank.
SAME = -1


def other_ranks(case: CaptureCase, result: Attempt) -> tuple[OtherRank, ...]:
    """Return the calls of other ranks that the float model takes as it does those of the example's rank: a
    batch of one without its dimension, and each row of several leading dimensions by itself.

    A graph has the ranks of its example; modules such as ``nn.Linear`` and ``nn.LSTM`` take others too.
    """
    sizes = result.sizes
    if case.is_step or any(tensor.is_meta for tensor in tensors_in(case.args)):
        return ()
    args = resized(case.args, case.inputs, sizes, next(trial_sizes(sizes, are_short=True), {}))
    inputs = dict(zip(case.inputs, pytree.tree_leaves(args), strict=True))
    forms = []
    for places in _leading(sizes):
        for several, shapes in ((False, NONE), (True, SEVERAL)):
            first, *others = shapes
            form = _form(case, sizes, args, inputs, OtherRank(places, (), several), first)
            if form is not None and all(_form(case, sizes, args, inputs, form, s) == form for s in others):
                forms.append(form)
    return tuple(forms)


def _leading(sizes: InputSizes) -> Iterator[Mapping[str, int]]:
    """Yield the first two dimensions of the first input that have sizes of their own, each with those of
    other inputs that are the same size."""
    first = next(iter(sizes.dimensions), None)
    for item in sizes.free:
        if first is not None and item.label == first.label and item.index < 2:
            alike = [other for other in sizes.dimensions if item.place in (other.place, other.root)]
            if len({other.label for other in alike}) == len(alike):
                yield {other.label: other.index for other in alike}


def _form(
    case: CaptureCase,
    sizes: InputSizes,
    args: tuple[Any, ...],
    inputs: Mapping[str, Any],
    form: OtherRank,
    shape: tuple[int, ...],
) -> OtherRank | None:
    """Return ``form`` with the dimensions of its results, if the float model computes the same with ``shape``
    in place of one dimension; None if it does not."""
    expected = {place: math.prod(shape) for place in form.of_inputs.items()}
    if sizes.broken_rule({**sizes_of(inputs), **expected}) is not None:
        return None
    one = _varied(with_sizes(args, inputs, expected))
    labels = iter(inputs)
    other = pytree.tree_map(lambda leaf: in_place_of(leaf, form.of_inputs.get(next(labels)), shape), one)
    run = case.runs.of_float_model(other)
    run_of_one = run if run.error is not None else case.runs.of_float_model(one)
    if run_of_one.error is not None:
        return None
    (leaves, spec), (own, own_spec) = map(pytree.tree_flatten, (run.value, run_of_one.value))
    dims = [next(_dims(*pair, shape), None) for pair in zip(leaves, own, strict=False)]
    is_same = spec == own_spec and all(dim is not None for dim in dims)
    return replace(form, of_results=tuple(None if dim == SAME else dim for dim in dims)) if is_same else None


def _dims(leaf: Any, own: Any, shape: tuple[int, ...]) -> Iterator[int]:
    """Yield the dimensions of ``own`` at which it is ``leaf`` with ``shape`` in place of them."""
    if difference(leaf, own, CAPTURED) is None:
        yield SAME
    for dim, size in enumerate(own.shape if isinstance(own, Tensor) else ()):
        is_it = size == math.prod(shape)
        if is_it and difference(leaf, in_place_of(own, dim, shape), CAPTURED) is None:
            yield dim


def _varied(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return ``args`` with other floats: of equal rows every mean is the row itself."""
    generator = torch.Generator().manual_seed(0)

    def other(leaf: Tensor) -> Tensor:
        if not leaf.is_floating_point():
            return leaf
        factors = torch.rand(leaf.shape, generator=generator).to(leaf.device, leaf.dtype)
        return leaf * (factors + 0.5) if leaf.any() else factors

    varied: tuple[Any, ...] = pytree.tree_map_only(Tensor, other, args)
    return varied
