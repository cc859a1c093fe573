"""Whether this machine and its quantized engine have the integer kernels that ``convert_fx`` lowers to.

Legacy: ``torch.backends.quantized.engine``, which FX's lowering and its packed weights follow. Recurrent
modules and linear layers run on this package's own products where an engine has no kernels.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from torchq_compat.errors import ConfigError
from torchq_compat.support.quantized_tensors import AVAILABLE, spend_deprecation_warning

__all__ = [
    "X86_ENGINES",
    "Engine",
    "decide_engine",
    "has_own_products",
    "packing_for",
    "torchs_kernels_alone",
]

_OWN_PRODUCTS: ContextVar[bool] = ContextVar("torchq_compat_own_products", default=True)

X86_MACHINES = ("x86_64", "amd64", "i386", "i686")
X86_ENGINES = ("x86", "onednn", "fbgemm")
#: The engines that torch knows; ``none`` if it was built without any.
KNOWN_ENGINES = (*X86_ENGINES, "qnnpack", "none")


@dataclass(frozen=True)
class Engine:
    """A quantized engine.

    Attributes:
        name: as in ``torch.backends.quantized.engine``.
        why_not: why torch's kernels for this engine are not used; empty if they are.
    """

    name: str
    why_not: str = ""

    @property
    def has_kernels(self) -> bool:
        return not self.why_not


def decide_engine(name: str | None = None, machine: str | None = None) -> Engine:
    """Decide which kernels ``convert_fx`` has for an engine on a machine; by default, the current ones.

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
    if name == "none":
        return Engine(name, "the quantized engine is 'none', which has no kernels")
    if name in X86_ENGINES and machine.lower() not in X86_MACHINES:
        reason = f"the machine is {machine or 'unknown'}; the kernels of {name} are for x86 CPUs"
        return Engine(name, reason)
    if not AVAILABLE:
        return Engine(name, "this torch has no quantized tensors, which the kernels need")
    return Engine(name)


@contextmanager
def packing_for(engine: Engine) -> Iterator[None]:
    """Pack weights for ``engine`` inside the ``with`` block."""
    spend_deprecation_warning()
    before = torch.backends.quantized.engine
    if before == engine.name:  # A torch without any engine refuses the assignment.
        yield
        return
    torch.backends.quantized.engine = engine.name
    try:
        yield
    finally:
        torch.backends.quantized.engine = before


@contextmanager
def torchs_kernels_alone() -> Iterator[None]:
    """Lower to torch's kernels alone inside the ``with`` block, to run without this package (TorchScript)."""
    token = _OWN_PRODUCTS.set(False)
    try:
        yield
    finally:
        _OWN_PRODUCTS.reset(token)


def has_own_products() -> bool:
    """Return whether this package's own matrix products may be used."""
    return _OWN_PRODUCTS.get()
