"""The registry of custom-module kinds: what the stages know of them.

A new kind is one file with a handler that calls ``register``; no stage changes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.ao.quantization import QConfig

from torchq_compat.custom_modules.leaf_module import LeafModule
from torchq_compat.custom_modules.leaf_op import FakeCall
from torchq_compat.decisions import Decision
from torchq_compat.observed_graph import ObserverFault
from torchq_compat.specs.quantization_specs import OpSpecs

__all__ = ["CustomModuleHandler", "ObserveRequest", "handlers", "register"]


@dataclass(frozen=True)
class ObserveRequest:
    """A float module to make an observed one from."""

    module: nn.Module
    path: str
    observed_class: type[nn.Module]
    qconfig: QConfig
    specs: OpSpecs


class CustomModuleHandler(ABC):
    """One kind of custom module. Float modules handed to a handler are copies: it may use them up."""

    @abstractmethod
    def takes(self, float_class: type[nn.Module], observed_class: type[nn.Module]) -> bool:
        """Whether this handler carries out the mapping float_class -> observed_class."""

    @abstractmethod
    def is_opaque(self, module: nn.Module) -> bool:
        """Whether a float ``module`` left as it is must stay one call, because torch.export would unroll
        it or fix its sizes."""

    @abstractmethod
    def fake_call(self, module: nn.Module, path: str) -> FakeCall:
        """A function with the arguments of ``module`` that computes the shapes and dtypes of its result;
        ``path`` is for its error messages."""

    @abstractmethod
    def observe(self, request: ObserveRequest) -> LeafModule:
        """Make the observed module.

        Raises:
            CustomModuleError: the observed class does not do what the mapping promises.
        """

    @abstractmethod
    def output_dtypes(self, leaf: LeafModule) -> tuple[torch.dtype | None, ...]:
        """The quantized dtype in which consumers receive each flat result of an observed module."""

    @abstractmethod
    def owns(self, leaf: nn.Module) -> bool:
        """Whether ``leaf`` is an observed or converted module of this kind."""

    @abstractmethod
    def convert(self, leaf: LeafModule, quantized_class: type[nn.Module] | None, path: str) -> LeafModule:
        """Make the converted module, leaving ``leaf`` as it is."""

    @abstractmethod
    def remedy(self, module: nn.Module) -> str | None:
        """What a user could do about a float ``module`` that a quantized qconfig leaves float because
        nothing maps it; None if this kind has nothing to say about it."""

    def quantized_class(
        self, leaf: LeafModule, mapping: Mapping[type[nn.Module], type[nn.Module]]
    ) -> type[nn.Module] | None:
        """The entry of an observed-to-quantized mapping that is about ``leaf``: keyed on its class, on a
        base class, or on the class the script mapped the float module to."""
        classes = (type(leaf), leaf.observed_class or type(leaf))
        return next((to for key, to in mapping.items() if any(issubclass(c, key) for c in classes)), None)

    def observer_faults(self, leaf: LeafModule) -> list[tuple[str, ObserverFault]]:
        """(where inside ``leaf``, what) of observers that cannot be converted."""
        return []

    def explain(self, leaf: LeafModule, path: str) -> Iterator[Decision]:
        """The decisions inside an observed or converted module."""
        return iter(())


_HANDLERS: list[CustomModuleHandler] = []


def register(handler: CustomModuleHandler) -> CustomModuleHandler:
    """Add a kind. Later ones are asked first, so that a user's handler can take over."""
    _HANDLERS.insert(0, handler)
    return handler


def handlers() -> tuple[CustomModuleHandler, ...]:
    import torchq_compat.custom_modules.recurrent.handler  # noqa: F401  (registers itself)

    return tuple(_HANDLERS)


def handler_of(leaf: Any) -> CustomModuleHandler | None:
    """The handler of an observed or converted module."""
    return next((handler for handler in handlers() if handler.owns(leaf)), None)
