"""What can be wrong with a recurrent custom module, in words."""

from __future__ import annotations

from torchq_compat.errors import CustomModuleError

__all__ = ["RecurrentModuleError"]


class RecurrentModuleError(CustomModuleError):
    """A recurrent module that was observed, called or converted in a way it cannot be."""

    @classmethod
    def unusable_result(cls, path: str, method: str, found: object) -> RecurrentModuleError:
        return cls(
            f"{method} of the custom module at {path!r} returned {type(found).__name__}, "
            "which this package cannot run.",
            hint="return the object made by torchq_compat.recurrent_parts or torchq_compat.lstm_utils, "
            "or, for an LSTM, a torch.ao.nn.quantizable.LSTM.",
        )

    @classmethod
    def observed_by_fx(cls, path: str) -> RecurrentModuleError:
        return cls(
            f"the LSTM at {path!r} was observed by the FX engine.",
            hint="import get_lstm_with_individually_observed_parts from torchq_compat.lstm_utils, "
            "or start the script with 'torchq-compat run'.",
        )

    @classmethod
    def packed_in_export(cls, path: str) -> RecurrentModuleError:
        return cls(
            f"the recurrent module at {path!r} is called with a PackedSequence, which torch.export cannot "
            "carry: its batch sizes are data.",
            hint="pack outside the model and call the prepared or converted module itself with the "
            "PackedSequence, or pass padded sequences.",
        )
