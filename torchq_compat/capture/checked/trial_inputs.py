"""Inputs of other sizes than the example's, with values from the example.

Sizes that are equal in the example change together: they may be the batch of all inputs, or the length of all
sequences, even if torch.export did not detect that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from torchq_compat.sizes.find_sizes import Group, group_of
from torchq_compat.sizes.input_sizes import InputSizes, Place
from torchq_compat.support.upstream import pytree

__all__ = ["LONG", "SizeGroups", "resized", "sizes_at", "trial_sizes", "with_sizes"]

#: Sizes up to this one grow in trials; larger ones shrink.
SMALL = 8
#: What counts as a long sequence, and the numbers of steps that are tried in its place.
LONG, SHORT = 32, (12, 7)
#: The groups of sizes that change -> their new sizes.
SizeGroups = Mapping[Group, int]


def trial_sizes(sizes: InputSizes, *, are_short: bool = False) -> Iterator[SizeGroups]:
    """Yield up to two sets of sizes other than the example's that ``sizes`` allows.

    Args:
        are_short: whether to try short sequences first: a prepared recurrent module runs step by step.
    """
    known = dict.fromkeys(group_of(each) for each in sizes.free if each.example > 0)
    if not known:
        return
    leading = next(iter(known))
    firsts = {group: _first(group[0], is_batch=group == leading) for group in known}
    seconds = {group: _second(group[0], is_batch=group == leading) for group in known}
    if are_short:
        longs = [group for group in known if group[0] > LONG]
        firsts.update((group, [SHORT[0], *firsts[group]]) for group in longs)
        seconds.update((group, [SHORT[1], *seconds[group]]) for group in longs if group != leading)
    first, second = _choose(sizes, firsts), _choose(sizes, seconds)
    seen: list[SizeGroups] = []
    for groups in (first, second):
        if groups and groups not in seen:
            seen.append(groups)
            yield groups


def _first(size: int, *, is_batch: bool) -> list[int]:
    if is_batch:
        return [size + 1, 2 * size, size - 1]
    if size <= SMALL:
        return [2 * size, size + 1, 3 * size, size - 1]
    return [-(-size // 2), size - size // 4, 2 * size, size + 1]


def _second(size: int, *, is_batch: bool) -> list[int]:
    if is_batch:
        return [1, size - 1] if size > 1 else [3]
    return [size + 1, size + 2, size - 1] if size <= SMALL else [size - size // 4, size + 1, size - 1]


def _choose(sizes: InputSizes, candidates: Mapping[Group, Iterable[int]]) -> SizeGroups:
    """Return the first candidate of each group that breaks no rule."""
    chosen: dict[Group, int] = {}
    for group, others in candidates.items():
        for other in others:
            trial = {**chosen, group: other}
            if other > 0 and sizes.broken_rule(sizes_at(sizes, trial)) is None:
                chosen = trial
                break
    return chosen


def sizes_at(sizes: InputSizes, groups: SizeGroups) -> dict[Place, int]:
    """Return the size of each dimension where ``groups`` have those sizes, and what depends on them too."""
    found = {each.place: groups.get(group_of(each), each.example) for each in sizes.free}
    for each in sizes.dimensions:
        if not each.is_free:
            found[each.place] = each.example if each.root is None else found[each.root]
    return found


def resized(
    args: tuple[Any, ...], inputs: Mapping[str, Any], sizes: InputSizes, groups: SizeGroups
) -> tuple[Any, ...]:
    """Return ``args``, whose leaves by label are ``inputs``, resized to the sizes in ``groups``."""
    return with_sizes(args, inputs, sizes_at(sizes, groups))


def with_sizes(
    args: tuple[Any, ...], inputs: Mapping[str, Any], wanted: Mapping[tuple[str, int], int]
) -> tuple[Any, ...]:
    """Return ``args`` resized to the sizes in ``wanted``, by label and dimension."""
    labels = iter(inputs)

    def other(leaf: Any) -> Any:
        label = next(labels)
        if not isinstance(leaf, Tensor):
            return leaf
        for index, size in enumerate(leaf.shape):
            new = wanted.get((label, index), size)
            if new != size and size > 0:
                leaf = leaf.index_select(index, torch.arange(new, device=leaf.device) % size)
        leaf = _as_offsets(leaf, inputs[label], label, inputs, wanted)
        return _as_lengths(leaf, inputs[label], label, inputs, wanted)

    changed: tuple[Any, ...] = pytree.tree_map(other, args)
    return changed


def _as_offsets(
    leaf: Tensor,
    example: Tensor,
    label: str,
    inputs: Mapping[str, Any],
    wanted: Mapping[tuple[str, int], int],
) -> Tensor:
    """Return ``leaf``, the resized ``example``; if ``example`` may be the offsets of an EmbeddingBag into
    another input, return valid offsets, because with invalid ones the kernel reads memory beyond its indices.
    """
    if not _are_offsets(example):
        return leaf
    last = int(example[-1])
    for other, value in inputs.items():
        if other != label and isinstance(value, Tensor) and value.dim() and value.shape[0] >= last:
            size = wanted.get((other, 0), int(value.shape[0]))
            offsets = leaf.clamp(max=size).sort().values
            if last == value.shape[0] and offsets.numel():
                offsets[-1] = size
            return offsets
    return leaf


def _are_offsets(example: Tensor) -> bool:
    """Return whether ``example`` starts at 0, never decreases, and is not a plain count 0, 1, 2, ..."""
    if example.dim() != 1 or example.numel() < 2 or example.dtype not in (torch.int32, torch.int64):
        return False
    steps = example.diff()
    return bool((example[0] == 0) & (steps >= 0).all() & (steps != 1).any())


def _as_lengths(
    leaf: Tensor,
    example: Tensor,
    label: str,
    inputs: Mapping[str, Any],
    wanted: Mapping[tuple[str, int], int],
) -> Tensor:
    """Return ``leaf``, or valid lengths if ``example`` may be the lengths of the sequences in another input.

    No returned length exceeds the size of that input. If the longest sequence of the example fills the input,
    so does the longest returned one; if the lengths of the example are in descending order, so are these.
    """
    if example.dim() != 1 or example.dtype not in (torch.int32, torch.int64) or not example.numel():
        return leaf
    if int(example.min()) < 1:
        return leaf
    for other, value in inputs.items():
        if other == label or not isinstance(value, Tensor) or value.dim() < 2:
            continue
        for batch, time in ((0, 1), (1, 0)):
            steps = int(value.shape[time])
            if value.shape[batch] != example.numel() or steps < int(example.max()):
                continue
            longest = wanted.get((other, time), steps)
            fitting = torch.where(leaf == steps, longest, leaf.clamp(max=longest))
            falling = bool((example.diff() <= 0).all())
            return fitting.sort(descending=True).values if falling else fitting
    return leaf
