"""What can be wrong with a recurrent custom module, in words."""

from __future__ import annotations

from collections.abc import Iterable

from torchq_compat.errors import ConfigError, CustomModuleError

__all__ = ["PartConfigError", "RecurrentModuleError"]


class PartConfigError(ConfigError):
    """A setting of the parts of a cell that cannot be carried out."""

    @classmethod
    def missing_qconfig(cls, kind: str) -> PartConfigError:
        return cls(
            f"the float {kind} has no qconfig, so its parts without a constructor cannot be observed.",
            hint="prepare_fx sets it before it calls from_float; on your own, set its qconfig first.",
        )

    @classmethod
    def unknown_group(cls, name: str, kind: str, allowed: Iterable[str]) -> PartConfigError:
        return cls(
            f"{name} is no constructor of the parts of {kind}.",
            hint=f"it has {', '.join(sorted(allowed))}.",
        )

    @classmethod
    def no_gates(cls, kind: str) -> PartConfigError:
        return cls(
            f"split_gates=True, but {kind} has no gates to split.",
            hint="leave split_gates out.",
        )

    @classmethod
    def part_dtype(cls, part: str, op: str, asked: str, allowed: Iterable[str]) -> PartConfigError:
        return cls(
            f"part {part!r} is observed as {asked}, which the backend config does not allow for {op}.",
            hint=f"it allows {', '.join(sorted(allowed)) or 'nothing'}; add a DTypeConfig for {op}, "
            "or choose another dtype for the part.",
        )


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
