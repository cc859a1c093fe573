"""FX's checkpoints in a legacy script under ``run``: ``model.load_state_dict(torch.load(path))`` works.

A prepared model loads the state as ``load_fx_state`` does. A converted model is converted again from the
prepared model it came from, with the state loaded into that; so each converted model keeps a copy of its
prepared model.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from torchq_compat.checkpoints import load_fx_state
from torchq_compat.errors import CheckpointError, QuantizationWarning
from torchq_compat.fx_state.accepting import accept_fx_states
from torchq_compat.graph.graph_module import QuantizationGraphModule, Stage
from torchq_compat.migrate.legacy_api.legacy_names import CONVERTING
from torchq_compat.support import metadata

__all__ = ["accept_checkpoints", "remembering_prepared"]

Function = Callable[..., Any]


def accept_checkpoints() -> None:
    """Let ``load_state_dict`` of our models accept states of FX in this process."""
    accept_fx_states(_load)


def remembering_prepared(function: Function) -> Function:
    """Return ``function``; if it converts, its results keep a copy of the prepared model."""
    if function.__name__ not in CONVERTING:
        return function

    @functools.wraps(function)
    def remembering(*args: Any, **kwargs: Any) -> Any:
        converted = function(*args, **kwargs)
        prepared = args[0] if args else kwargs.get("graph_module")
        if isinstance(prepared, QuantizationGraphModule):
            source = copy.deepcopy(prepared)
            metadata.CONVERTED_FROM.write(
                converted.reference, lambda: function(source, *args[1:], **_without(kwargs, "graph_module"))
            )
            metadata.PREPARED.write(converted.reference, source)
        return converted

    return remembering


def _load(model: QuantizationGraphModule, state: Mapping[str, Any]) -> Any:
    if model.record.stage is Stage.PREPARED:
        load_fx_state(model, state)
        # This is the result of load_state_dict if all keys match.
        return nn.Module().load_state_dict({})
    prepared, convert = metadata.PREPARED.of(model.reference), metadata.CONVERTED_FROM.of(model.reference)
    if prepared is None or convert is None:
        raise CheckpointError(
            "a state of FX cannot be loaded into a copy of a converted model.",
            hint="load it into what convert_fx returned, or into the prepared model with load_fx_state.",
        )
    load_fx_state(prepared, state)
    with warnings.catch_warnings():
        # These warnings were given when the script converted.
        warnings.simplefilter("ignore", QuantizationWarning)
        return model.load_state_dict(convert().state_dict())


def _without(kwargs: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in kwargs.items() if key != name}
