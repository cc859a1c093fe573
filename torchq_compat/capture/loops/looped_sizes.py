"""Finds the sizes that determine how often a line of the model's Python runs."""

from __future__ import annotations

import itertools
import linecache
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchq_compat.capture import trial_runs
from torchq_compat.capture.sizes.numbers import GENERATED, is_of_libraries
from torchq_compat.capture.trial_runs import LONG, FloatRun, Runs, with_sizes

Place = tuple[str, int]
#: A call in the model's code: the innermost frame's code and instruction, the same of the user's innermost
#: frame, and the path of the innermost module.
Site = tuple[Any, int, Any, int, str]


@dataclass(frozen=True)
class LoopedSizes:
    """The input dimensions that determine how often a line runs.

    Attributes:
        groups: the dimensions, grouped with those that must have the same size.
        repeated: the paths of the modules that are called more than once.
        lines: the lines of the loops, in the order in which they run.
    """

    groups: tuple[tuple[Place, ...], ...]
    repeated: frozenset[str]
    lines: tuple[str, ...] = ()

    def sizes(self, each: tuple[int, ...] | list[int]) -> dict[Place, int]:
        return {place: size for group, size in zip(self.groups, each, strict=True) for place in group}


def find_looped_sizes(
    runs: Runs, args: tuple[Any, ...], inputs: Mapping[str, Any]
) -> tuple[LoopedSizes | None, FloatRun]:
    """Return the sizes that determine how often lines run, None if there are none; and the run of the float
    model on ``args``.

    Args:
        inputs: the leaves of ``args`` by label.
    """
    sites, example = _count_calls(runs, args)
    if not sites.repeated:
        return None, example
    size = {
        (label, index): int(length)
        for label, leaf in inputs.items()
        if isinstance(leaf, Tensor)
        for index, length in enumerate(leaf.shape)
        if length > 1
    }
    # What takes long is tried on smaller inputs, if the model takes them.
    smaller = {**size, **{place: -(-length // 4) for place, length in size.items() if length > LONG}}
    if smaller != size:
        counted, run = _count_calls(runs, with_sizes(args, inputs, smaller))
        if run.error is None:
            sites.counts, size = counted.counts, smaller
    groups: list[tuple[Place, ...]] = []
    lines: dict[str, None] = {}
    for place in size:
        if any(place in group for group in groups):
            continue
        alike = tuple(other for other in size if size[other] == size[place])
        pairs = [(place, other) for other in alike if other != place]
        # A loop may leave out every second step; and a table may have no entries for more steps.
        for more, group in itertools.product((2, -1), ((place,), alike, *pairs)):
            others, run = _count_calls(
                runs, with_sizes(args, inputs, {**size, **dict.fromkeys(group, size[place] + more)})
            )
            if run.error is not None:
                continue
            if changed := sites.differing(others):
                groups.append(group)
                lines.update(dict.fromkeys(filter(None, map(sites.repeated.get, changed))))
            break
    paths = frozenset(site[-1] for site in sites.repeated)
    return LoopedSizes(tuple(groups), paths, tuple(lines)) if groups else None, example


def _count_calls(runs: Runs, args: tuple[Any, ...]) -> tuple[_CallSites, FloatRun]:
    sites = _CallSites()
    return sites, runs.of_float_model(args, watching=sites.of)


class _CallSites(TorchFunctionMode):
    """Counts the calls of torch's functions at each place of the model's Python.

    Attributes:
        repeated: a call that ran more than once -> the line of the loop around it; empty if none is seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Site] = Counter()
        self.repeated: dict[Site, str] = {}
        self._paths: dict[int, str] = {}

    def of(self, model: nn.Module) -> _CallSites:
        self._paths = {id(module): path for path, module in model.named_modules()}
        return self

    def differing(self, others: _CallSites) -> list[Site]:
        """Return the calls of which ``others`` counted another number."""
        return [site for site, count in self.counts.items() if count != others.counts[site]]

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._count(sys._getframe(1))
        return function(*args, **(kwargs or {}))

    def _count(self, inner: FrameType) -> None:
        path = None
        for frame in _frames(inner):
            code = frame.f_code
            if path is None and code.co_varnames[:1] == ("self",):
                path = self._paths.get(id(frame.f_locals.get("self")))
            if path is not None and _is_users(code.co_filename):
                site = (inner.f_code, inner.f_lasti, code, frame.f_lasti, path)
                self.counts[site] += 1
                if self.counts[site] == 2:
                    self.repeated[site] = _line_of_loop(frame)
                return


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None and frame.f_code.co_filename != trial_runs.__file__:
        yield frame
        frame = frame.f_back


def _is_users(path: str) -> bool:
    return not path.startswith(GENERATED) and not is_of_libraries(path)


def _line_of_loop(inner: FrameType) -> str:
    """Return the line of the innermost loop statement around the calls that run; empty if none is seen."""
    for frame in _frames(inner):
        code, number = frame.f_code, frame.f_lineno
        if not _is_users(code.co_filename):
            continue
        depth = sys.maxsize
        for at in range(number, code.co_firstlineno - 1, -1):
            text = linecache.getline(code.co_filename, at)
            own = len(text) - len(text.lstrip())
            if text.strip() and own < depth:
                depth = own
                if text.lstrip().startswith(("for ", "while ")) or (at == number and " for " in text):
                    return f"{Path(code.co_filename).name}:{at} ({text.strip()})"
    return ""
