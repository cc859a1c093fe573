"""The passes of prepare, convert and lower, in their order: what each needs, gives and guarantees.

The values that a pass needs and gives are attributes of one state, which the passes of a list hand on. The
module that carries a pass out binds its function with ``carries_out``; ``run_passes`` runs a whole list.
"""

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torchq_compat.support.report import slow_stages

State = TypeVar("State")


@dataclass(frozen=True)
class Pass:
    """One pass.

    Attributes:
        name: what it does, an imperative.
        needs: the attributes of the state that it reads.
        gives: the attributes that it sets.
        guarantees: what is true after it.
    """

    name: str
    needs: list[str]
    gives: list[str]
    guarantees: str


_STAGES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
#: Stage -> its passes.
PASSES = {stage: tuple(Pass(**row) for row in rows) for stage, rows in _STAGES.items()}
PREPARE, CONVERT, LOWER = PASSES["prepare"], PASSES["convert"], PASSES["lower"]

_BOUND: dict[tuple[int, str], Callable[[Any], None]] = {}


def carries_out(
    passes: tuple[Pass, ...], name: str
) -> Callable[[Callable[[State], None]], Callable[[State], None]]:
    """Return a decorator that binds a function of the state to the pass ``name`` of ``passes``."""
    assert any(item.name == name for item in passes), name

    def bind(function: Callable[[State], None]) -> Callable[[State], None]:
        _BOUND[id(passes), name] = function
        return function

    return bind


def run_passes(passes: tuple[Pass, ...], state: Any, model: Any) -> None:
    """Run ``passes`` on ``state``, each with what it needs; ``model`` is what they start from."""
    # Here, so that `torchq-compat explain` starts without torch.
    from torchq_compat.support.process_state import deep_enough_for, forget_sources, without_autocast

    stage = next(stage for stage, listed in PASSES.items() if listed is passes)
    forget_sources()
    with deep_enough_for(model), without_autocast(), slow_stages(stage) as begin:
        for item in passes:
            assert all(hasattr(state, name) for name in item.needs), item
            begin(item.name)
            _BOUND[id(passes), item.name](state)
            assert all(hasattr(state, name) for name in item.gives), item
