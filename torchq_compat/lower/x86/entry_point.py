"""Lower a model that ``convert_fx`` converted, or warn why it remains a reference model."""

from __future__ import annotations

from dataclasses import replace

from torchq_compat.graph.graph_module import ConvertedGraphModule, ConvertedModel
from torchq_compat.lower.x86.dropout_qparams import hand_on_through_dropout
from torchq_compat.lower.x86.engines import Engine, decide_engine
from torchq_compat.lower.x86.lowered_module import lower
from torchq_compat.support import metadata
from torchq_compat.support.decisions import Action, Decision
from torchq_compat.support.user_warnings import warn_user

__all__ = ["lower_or_warn"]


def lower_or_warn(reference: ConvertedGraphModule) -> ConvertedModel:
    """Return ``reference`` on the integer kernels of the engine in use; if the engine has none, on this
    package's own kernels for recurrent modules and linear layers.

    Raises:
        ConfigError: an engine that torch does not have.
    """
    engine = decide_engine()
    if not engine.has_kernels:
        _note(reference, engine)
        warn_user(
            "convert_fx runs recurrent modules and linear layers on integers, and everything else in floats "
            f"between its q-dq: {engine.why_not}. Set torch.backends.quantized.engine, or call "
            "convert_to_reference_fx if the reference is wanted."
        )
    else:
        hand_on_through_dropout(reference)
    lowered = lower(reference, engine)
    _warn(lowered.lowering)
    return lowered


def _warn(decisions: tuple[Decision, ...]) -> None:
    for decision in decisions:
        if decision.warn:
            warn_user(f"{decision.kind} at {decision.path!r} {decision.reason}")


def _note(reference: ConvertedGraphModule, engine: Engine) -> None:
    decision = Decision("", "convert_fx", Action.REFERENCE, engine.why_not, warn=True)
    record = reference.record
    metadata.RECORD.write(reference, replace(record, decisions=(*record.decisions, decision)))
