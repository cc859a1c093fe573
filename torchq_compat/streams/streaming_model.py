"""``streaming``: the model with its recurrent states kept inside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchq_compat.custom_modules.recurrent.modules.streams import Streams
from torchq_compat.errors import StreamingError
from torchq_compat.graph.graph_module import ConvertedGraphModule, QuantizationGraphModule
from torchq_compat.streams.causality import check_causality
from torchq_compat.streams.recurrent_calls import recurrent_calls
from torchq_compat.support.argument_checks import (
    INDEX,
    Expected,
    check_arguments,
    checked_arguments,
    instance_of,
    optional,
)
from torchq_compat.support.user_warnings import warn_user

__all__ = ["StreamingModel", "streaming"]

STREAMS = optional(Expected("an int, a list of ints or a mask", lambda given: _are_whole(given)))
CHOOSE_QPARAMS = "choose_qparams"


class StreamingModel(nn.Module):
    """A converted model whose recurrent modules begin each call where the last one ended.

    Args:
        model: what ``convert_fx`` or ``convert_to_reference_fx`` returned; it is not changed.
        streams: the calls that keep their state.
    """

    def __init__(self, model: QuantizationGraphModule, streams: Streams) -> None:
        super().__init__()
        self.model = model
        # No part of any state_dict: a state belongs to the sequences that are fed.
        self.streams = streams

    # Dynamo cannot read a ContextVar, and would leave out the states.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on the next chunk of every stream.

        Args:
            *args: as the converted model takes them; every stream is one row of the batch.
            **kwargs: the same.

        Returns:
            What the model returns for the chunk.

        Raises:
            InputError: another number of streams than before.
        """
        with torch.no_grad(), self.streams.active():
            return self.model(*args, **kwargs)

    def reset(self, indices: Sequence[int] | Tensor | None = None) -> None:
        """Begin again.

        Args:
            indices: of the streams, by their place in the batch, or a mask of them; None: all, and the next
                chunk may be of another batch.

        Raises:
            ArgumentError: ``indices`` are no ints.
            InputError: no such stream.
        """
        check_arguments("reset", {"indices": STREAMS}, {"indices": indices})
        self.streams.reset(indices)


def _are_whole(given: Any) -> bool:
    if isinstance(given, Tensor):
        return not (given.is_floating_point() or given.is_complex())
    return INDEX.accepts(given) or (
        isinstance(given, (list, tuple, range)) and all(isinstance(each, int) for each in given)
    )


@checked_arguments(converted=instance_of(nn.Module, what="an nn.Module"))
def streaming(converted: nn.Module) -> StreamingModel:
    """The same model, fed in chunks of any length down to one step.

    The states of recurrent calls to which the model gives none, or always the same, are kept inside; a state
    that the model takes from its caller stays the caller's. Fed a sequence in chunks the model gives the bits
    it gives for the whole, if every step is computed from those before it alone: that is tried here.

    Args:
        converted: what ``convert_fx`` or ``convert_to_reference_fx`` returned; it is not changed.

    Returns:
        A module called as ``converted`` is. ``reset()`` begins again, ``reset(indices)`` single streams of
        the batch.

    Raises:
        StreamingError: no converted model, no recurrent module, or one that cannot run in pieces: a
            bidirectional module, a conv, pooling or attention over time, a mean over time; names the place.

    Example:
        >>> import torch
        >>> from torch.ao.quantization import get_default_qconfig_mapping
        >>> from torchq_compat import convert_fx, get_default_prepare_custom_config, prepare_fx, streaming
        >>> class Tagger(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.rnn, self.fc = torch.nn.LSTM(4, 8), torch.nn.Linear(8, 2)
        ...
        ...     def forward(self, x):
        ...         return self.fc(self.rnn(x)[0])
        >>> mapping, x = get_default_qconfig_mapping("x86"), torch.randn(9, 3, 4)
        >>> prepared = prepare_fx(Tagger().eval(), mapping, (x,), get_default_prepare_custom_config())
        >>> _ = prepared(x)
        >>> converted = convert_fx(prepared)
        >>> stream = streaming(converted)
        >>> torch.equal(torch.cat([stream(x[:5]), stream(x[5:6]), stream(x[6:])]), converted(x))
        True
    """
    reference = getattr(converted, "reference", None)
    if not isinstance(reference, ConvertedGraphModule) or not isinstance(converted, QuantizationGraphModule):
        raise _not_converted(converted)
    if reference.record.steps:
        raise _has_loops(reference.record.steps)
    calls = recurrent_calls(reference)
    dynamic = [call.key[0] for call in calls if call.is_dynamic]
    ranged = [node.name for node in reference.graph.nodes if CHOOSE_QPARAMS in str(node.target)]
    check_causality(reference, calls, is_dynamic=bool(dynamic or ranged))
    if dynamic or ranged:
        warn_user(
            f"streaming: {', '.join((*dynamic, *ranged))} are quantized dynamically, with the range of each "
            "chunk: the results are close to those of the whole sequence, and not the same bits."
        )
    return StreamingModel(converted, Streams(frozenset(call.key for call in calls if call.keeps_state)))


def _has_loops(steps: tuple[str, ...]) -> StreamingError:
    paths = ", ".join(repr(step.removesuffix(".step")) for step in steps)
    return StreamingError(
        f"streaming: the model runs a loop over time of its own, at {paths}, which begins anew at each call.",
        hint="give the model the states of its loop as arguments and results, and feed them back yourself.",
    )


def _not_converted(found: nn.Module) -> StreamingError:
    return StreamingError(
        f"streaming: {type(found).__name__} is no model that convert_fx or convert_to_reference_fx returned.",
        hint="prepare_fx, calibrate, convert_fx, then streaming(what convert_fx returns).",
    )
