"""Libraries that a release carries, one for each instruction set, made without the machines they are for.

A wheel for Linux has them in ``libraries``; a source distribution has none, and a compiler on the user's
machine makes one at first use.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = ["LIBRARIES", "TARGETS", "Target", "carried_library"]

LIBRARIES = Path(__file__).with_name("libraries")
#: For each machine, the best instruction set first.
X86_AVX512_VNNI = ("-mprefer-vector-width=512", "-march=x86-64-v4", "-mavx512vnni")


@dataclass(frozen=True)
class Target:
    """An instruction set a library is made for.

    Attributes:
        machine: as ``platform.machine`` says it.
        name: of its file.
        flags: of the compiler.
        needs: what ``torch.cpu.get_capabilities`` has to have.
    """

    machine: str
    name: str
    flags: tuple[str, ...]
    needs: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        return LIBRARIES / f"recurrent_{self.machine}_{self.name}.so"

    def runs_here(self) -> bool:
        """Whether this CPU has the instructions."""
        found = torch.cpu.get_capabilities()
        return platform.machine() == self.machine and all(found.get(each) for each in self.needs)


TARGETS = (
    Target("x86_64", "avx512_vnni", X86_AVX512_VNNI, ("avx512_f", "avx512_bw", "avx512_vl", "avx512_vnni")),
    Target("x86_64", "avx2", ("-march=x86-64-v3",), ("avx2", "fma3")),
    Target("x86_64", "sse2", ("-march=x86-64",)),
    Target("aarch64", "dotprod", ("-march=armv8.2-a+dotprod",), ("neon_dotprod",)),
    Target("aarch64", "neon", ("-march=armv8-a",)),
)


def carried_library() -> Path | None:
    """The library of this release for this CPU; None if it carries none."""
    return next((each.path for each in TARGETS if each.runs_here() and each.path.exists()), None)
