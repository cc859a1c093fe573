"""Checks that a prepared model with its observers off computes what the float model does."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import nn

from torchq_compat.capture.checked.attempts import (
    Attempt,
    CaptureCase,
    compare_runs,
    differs,
    least_sqnr,
)
from torchq_compat.capture.checked.same_results import CAPTURED, FOLDED
from torchq_compat.capture.checked.trial_inputs import LONG
from torchq_compat.capture.checked.trial_runs import FloatRun, in_double, run_prepared
from torchq_compat.errors import CaptureError
from torchq_compat.support.decisions import Action, Decision
from torchq_compat.support.upstream import BatchNormBase, is_activation_post_process

__all__ = ["check_prepared", "trial_runs"]


def trial_runs(case: CaptureCase, found: Attempt) -> list[FloatRun]:
    """Return the runs of the float model at the example's sizes and at all others that were tried; prepared
    recurrent modules run step by step, so a long example is left out where short ones were tried."""
    others = [trial.run for trial in found.trials if trial.problem is None]
    long = any(dimension.example > LONG for dimension in found.sizes.free)
    return others if case.runs.modules and long and others else [case.example, *others]


def check_prepared(
    prepared: nn.Module,
    case: CaptureCase,
    found: Attempt,
    users_own: Sequence[str],
    lost_forwards: Sequence[str],
) -> tuple[Decision, ...]:
    """Run ``prepared`` beside the float model in all ``trial_runs``.

    Args:
        users_own: paths of modules whose observed class the user wrote, which may compute something else.
        lost_forwards: paths of modules with a ``forward`` of their own that is no longer called.

    Returns:
        A decision to warn about, if the results differ and the user's own classes may be the cause.

    Raises:
        CaptureError: the results differ.
    """
    has_batch_norm = any(isinstance(m, BatchNormBase) for m in case.runs.model.modules())
    least = least_sqnr(found.blocks, FOLDED if has_batch_norm else CAPTURED)
    for run in trial_runs(case, found):
        args = run.args

        def again(*, double: bool, args: tuple[Any, ...] = args) -> Any:
            if not double:
                return run_prepared(prepared, args, is_activation_post_process)
            return run_prepared(copy.deepcopy(prepared).double(), in_double(args), is_activation_post_process)

        problem = compare_runs(case.runs, run, again, least)
        if problem is not None and users_own:
            reason = f"without observers it computes something else than the float model ({problem})"
            return (Decision(", ".join(users_own), "observed class", Action.QUANTIZED, reason, warn=True),)
        if problem is not None and lost_forwards:
            where = ", ".join(repr(path) for path in lost_forwards)
            raise CaptureError.lost_forward(type(case.runs.model).__name__, where, problem)
        if problem is not None:
            raise differs(case, "the prepared model", problem)
    return ()
