"""What can be wrong with the parts of a custom module, in words."""

from __future__ import annotations

from collections.abc import Iterable

from torchq_compat.errors import ConfigError

__all__ = ["PartConfigError"]


class PartConfigError(ConfigError):
    """A setting of parts that cannot be carried out."""

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
