"""Whether this machine and its quantized engine have the integer kernels ``convert_fx`` lowers to.

Legacy: ``torch.backends.quantized.engine``, which FX's lowering and its packed weights follow.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from torchq_compat.errors import ConfigError
from torchq_compat.support.quantized_tensors import spend_deprecation_warning

__all__ = ["Engine", "decide_engine", "packing_for"]

X86_MACHINES = ("x86_64", "amd64", "i386", "i686")
X86_ENGINES = ("x86", "onednn", "fbgemm")
#: Engines torch knows; ``none`` where it was built without any.
KNOWN_ENGINES = (*X86_ENGINES, "qnnpack", "none")


@dataclass(frozen=True)
class Engine:
    """A quantized engine.

    Attributes:
        name: as in ``torch.backends.quantized.engine``.
        why_not: why nothing is lowered for it; empty if it is lowered to.
    """

    name: str
    why_not: str = ""

    @property
    def is_lowered_to(self) -> bool:
        return not self.why_not


def decide_engine(name: str | None = None, machine: str | None = None) -> Engine:
    """Decide what ``convert_fx`` does for an engine on a machine; default: the ones in use.

    Raises:
        ConfigError: an engine that torch does not have.
    """
    name = torch.backends.quantized.engine if name is None else name
    machine = platform.machine() if machine is None else machine
    if name not in KNOWN_ENGINES:
        raise ConfigError(
            f"torch.backends.quantized.engine is {name!r}, an engine convert_fx does not know.",
            hint=f"set it to one of {', '.join(KNOWN_ENGINES)}; or call convert_to_reference_fx, which "
            "needs none.",
        )
    if name not in X86_ENGINES:
        return Engine(name, f"the quantized engine is {name!r}; lowered are {', '.join(X86_ENGINES)}")
    if machine.lower() not in X86_MACHINES:
        return Engine(name, f"the machine is {machine or 'unknown'}; the kernels are for x86 CPUs")
    if not hasattr(torch, "quint8"):
        return Engine(name, "this torch has no quantized tensors, which the kernels take")
    return Engine(name)


@contextmanager
def packing_for(engine: Engine) -> Iterator[None]:
    """Weights packed meanwhile are packed for ``engine``."""
    spend_deprecation_warning()
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = engine.name
    try:
        yield
    finally:
        torch.backends.quantized.engine = before
