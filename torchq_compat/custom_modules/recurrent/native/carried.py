"""The kernel libraries that a release carries, one for each architecture, cross-compiled.

A wheel for Linux has them in ``libraries``. A source distribution has none: the kernel is compiled on the
user's machine on first use.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

__all__ = ["LIBRARIES", "TARGETS", "Target", "carried_library"]

LIBRARIES = Path(__file__).with_name("libraries")


@dataclass(frozen=True)
class Target:
    """An architecture that a library is compiled for; the instruction set is chosen at run time.

    Attributes:
        machine: the name of the architecture in ``platform.machine``.
        flags: flags for the compiler.
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
    """Return the path of the carried library for this machine; None if the release carries none."""
    return next((each.path for each in TARGETS if each.runs_here() and each.path.exists()), None)
