"""Libraries that a release carries, one for each architecture, made without the machines they are for.

A wheel for Linux has them in ``libraries``; a source distribution has none, and a compiler on the user's
machine makes one at first use.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

__all__ = ["LIBRARIES", "TARGETS", "Target", "carried_library"]

LIBRARIES = Path(__file__).with_name("libraries")


@dataclass(frozen=True)
class Target:
    """An architecture a library is made for; the instruction set is chosen while it runs.

    Attributes:
        machine: as ``platform.machine`` says it.
        flags: of the compiler.
    """

    machine: str
    flags: tuple[str, ...]

    @property
    def path(self) -> Path:
        return LIBRARIES / f"recurrent_{self.machine}.so"

    def runs_here(self) -> bool:
        return platform.machine() == self.machine


TARGETS = (Target("x86_64", ("-march=x86-64",)), Target("aarch64", ("-march=armv8-a",)))


def carried_library() -> Path | None:
    """The library of this release for this machine; None if it carries none."""
    return next((each.path for each in TARGETS if each.runs_here() and each.path.exists()), None)
