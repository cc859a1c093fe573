"""The passes of prepare, convert and lower, in their order: what each needs, gives and guarantees.

The values that a pass needs and gives are attributes of one state, which the passes of a list hand on. The
module that carries a pass out binds its function with ``carries_out``; ``run_passes`` runs a whole list.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

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
    needs: tuple[str, ...]
    gives: tuple[str, ...]
    guarantees: str


PREPARE = (
    Pass(
        "copy the model",
        ("model", "request"),
        ("working", "signature", "modules", "cumulative"),
        "the user's model stays as it is; training flags and computed weights are settled in the copy",
    ),
    Pass(
        "roll loops",
        ("working", "signature"),
        ("with_loops",),
        "a loop over time that can be rolled is a module with one step",
    ),
    Pass(
        "select custom modules",
        ("with_loops", "working"),
        ("swaps", "decisions", "leftovers"),
        "every module that is not traced has a handler; what is left behind is a decision",
    ),
    Pass(
        "capture",
        ("swaps", "with_loops"),
        ("tried", "captured"),
        "one graph without in-place writes, run beside the float model at each size it takes",
    ),
    Pass(
        "observe custom modules",
        ("captured", "swaps"),
        ("boundaries",),
        "each opaque call calls an observed module, with the specs of its inputs and results",
    ),
    Pass(
        "insert observers",
        ("captured", "boundaries"),
        ("interface", "batch_norms", "observed"),
        "every annotated edge and node has its observer; shared ones are one module",
    ),
    Pass(
        "wrap",
        ("observed", "interface", "batch_norms", "decisions"),
        ("prepared",),
        "a model with the float model's signature, and a record of every decision",
    ),
    Pass(
        "check",
        ("prepared", "captured"),
        (),
        "with its observers off it computes what the float model does, or a decision says where not",
    ),
)

CONVERT = (
    Pass(
        "check what is given",
        ("prepared", "settings", "rules", "backend"),
        ("record", "switched_off"),
        "a model of ours, prepared; what is given and changes nothing is told",
    ),
    Pass(
        "copy the prepared model",
        ("prepared", "record"),
        ("working", "removed"),
        "the prepared model stays usable; observers that the script took away are gone",
    ),
    Pass(
        "convert custom modules",
        ("working",),
        ("owners",),
        "every opaque call calls a converted module",
    ),
    Pass(
        "convert the graph",
        ("working", "owners"),
        ("converted", "replaced"),
        "q-dq where observers were, none twice at a boundary; inputs and results are integers as asked",
    ),
    Pass(
        "wrap",
        ("converted", "removed", "replaced", "owners"),
        ("reference",),
        "the q-dq graph, on which every other form is based, with its decisions",
    ),
)

LOWER = (
    Pass(
        "hand qparams through dropout",
        ("reference",),
        (),
        "a dropout of integers returns the integers it is given",
    ),
    Pass(
        "rewrite to plain integers",
        ("reference", "trial_inputs"),
        ("lowered",),
        "a graph of plain tensors, with the bits of the reference where both were run",
    ),
    Pass("tell", ("lowered",), (), "what stays in floats and could mislead is warned about once"),
)

#: Stage -> its passes.
PASSES = {"prepare": PREPARE, "convert": CONVERT, "lower": LOWER}

_BOUND: dict[tuple[int, str], Callable[[Any], None]] = {}


def carries_out(
    passes: tuple[Pass, ...], name: str
) -> Callable[[Callable[[State], None]], Callable[[State], None]]:
    """Return a decorator that binds a function of the state to the pass ``name`` of ``passes``."""
    assert any(each.name == name for each in passes), name

    def bind(function: Callable[[State], None]) -> Callable[[State], None]:
        _BOUND[id(passes), name] = function
        return function

    return bind


def run_passes(passes: tuple[Pass, ...], state: Any) -> None:
    """Run ``passes`` on ``state``, each with what it needs."""
    for each in passes:
        assert all(hasattr(state, name) for name in each.needs), each
        _BOUND[id(passes), each.name](state)
        assert all(hasattr(state, name) for name in each.gives), each
