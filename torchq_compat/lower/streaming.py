"""``streaming``: a converted model that keeps its recurrent states."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchq_compat.errors import ExportError
from torchq_compat.lower import causality
from torchq_compat.model.graph_module import ConvertedGraphModule, QuantizationGraphModule
from torchq_compat.recurrent.states import CallKey, Streams
from torchq_compat.support import argument_checks
from torchq_compat.support.user_warnings import warn_user

STREAMS = argument_checks.optional(
    argument_checks.Expected("an int, a list of ints or a mask", lambda given: _are_whole(given))
)


class StreamingModel(nn.Module):
    """A converted model whose recurrent modules start each call from the last state of the previous call.

    Args:
        model: what ``convert_fx`` or ``convert_to_reference_fx`` returned; it is not changed.
        streams: the calls that keep their state.
    """

    def __init__(self, model: QuantizationGraphModule, streams: Streams) -> None:
        super().__init__()
        self.model = model
        # Not in the state_dict: a state belongs to the sequences that were fed.
        self.streams = streams

    # Dynamo cannot read a ContextVar and would drop the states.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on the next chunk of every stream.

        Args:
            *args: as for the converted model; every row of the batch is one stream.
            **kwargs: as for the converted model.

        Returns:
            What the model returns for the chunk.

        Raises:
            InputError: the number of streams differs from the previous chunk's.
        """
        with torch.no_grad(), self.streams.active():
            return self.model(*args, **kwargs)

    def reset(self, indices: Sequence[int] | Tensor | None = None) -> None:
        """Begin streams again.

        Args:
            indices: the positions of streams in the batch, or a mask of them; None for all streams, and the
                next chunk may then have another batch size.

        Raises:
            ArgumentError: ``indices`` are no ints.
            InputError: there is no such stream.
        """
        argument_checks.check_arguments("reset", {"indices": STREAMS}, {"indices": indices})
        self.streams.reset(indices)


def _are_whole(given: Any) -> bool:
    if isinstance(given, Tensor):
        return not (given.is_floating_point() or given.is_complex())
    return argument_checks.INDEX.accepts(given) or (
        isinstance(given, (list, tuple, range)) and all(isinstance(item, int) for item in given)
    )


@argument_checks.checked_arguments(converted=argument_checks.instance_of(nn.Module, what="an nn.Module"))
def streaming(converted: nn.Module) -> StreamingModel:
    """Return the same model, fed in chunks of any length down to one step.

    The states of recurrent modules, and of loops over time that are rolled, to which the model gives none, or
    always the same, are kept inside; a state that the model accepts from its caller is left to the caller.
    On a sequence in chunks the model computes the bits that it computes on the whole, if every step depends
    only on the steps before it: this is tried here.

    Args:
        converted: what ``convert_fx`` or ``convert_to_reference_fx`` returned; it is not changed.

    Returns:
        A module called like ``converted``. ``reset()`` begins all streams again, ``reset(indices)`` single
        streams of the batch.

    Raises:
        ExportError: no converted model, nothing recurrent, or an op that cannot run in pieces: a
            bidirectional module, a conv, pooling, attention or mean over time; the error names its place.

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
        raise ExportError.of("TQ931.not_converted", module=converted)
    trial = causality.TrialCalls(reference, reference.record.signature.sizes)
    calls = causality.recurrent_calls(trial)
    known = {call.key[0] for call in calls}
    if hidden := [step for step in reference.record.steps if step.removesuffix(".step") not in known]:
        paths = ", ".join(repr(step.removesuffix(".step")) for step in hidden)
        raise ExportError.of("TQ931.own_loop", paths=paths)
    dynamic = [call.key[0] for call in calls if call.is_dynamic]
    ranged = [node.name for node in reference.graph.nodes if causality.CHOOSE_QPARAMS in str(node.target)]
    causality.check_causality(trial, calls, is_dynamic=bool(dynamic or ranged))
    if dynamic or ranged:
        warn_user("TQ503", modules=", ".join((*dynamic, *ranged)))
    return StreamingModel(converted, causality.streams_of([call for call in calls if call.keeps_state]))


# A streaming model as ``export`` traces it: with its states as buffers.


class StreamProgram(nn.Module):
    """A q-dq graph that writes its states back into buffers.

    Args:
        graph: the module to export.
        model: the model that ``graph`` was made from, in eager mode.
        streams: the calls that keep their state.
        args: example arguments, in the batch size to export.
    """

    def __init__(self, graph: nn.Module, model: nn.Module, streams: Streams, args: tuple[Any, ...]) -> None:
        super().__init__()
        # A GraphModule cannot have a submodule named ``graph``, and the exported program is one.
        self.computation = graph
        first = Streams(streams.kept, rows=streams.rows)
        with torch.no_grad(), first.active():
            model(*args)
        self._rows = streams.rows
        self._names: dict[CallKey, tuple[str, ...]] = {}
        for index, (key, states) in enumerate(sorted(first.initial.items())):
            self._names[key] = tuple(f"state_{index}_{position}" for position in range(len(states)))
            for name, state in zip(self._names[key], states, strict=True):
                self.register_buffer(name, state.detach().clone())

    def forward(self, *args: Any) -> Any:
        states: dict[CallKey, tuple[Tensor, ...]] = {
            key: tuple(getattr(self, name) for name in names) for key, names in self._names.items()
        }
        with Streams(frozenset(states), states, rows=self._rows, buffers=True).active():
            return self.computation(*args)
