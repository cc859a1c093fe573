"""A user's module as an opaque module: the same object, its class replaced by a subclass that the graph can
call with flat tensors.

The module keeps its path, its state and its ``isinstance`` relations; ``torch.nn.utils.parametrize`` adds
behaviour to a module in the same way.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule

from torchq_compat.errors import UserModuleError
from torchq_compat.opaque_calls.layouts import CallLayout, Structure
from torchq_compat.opaque_calls.opaque_module import OpaqueModule
from torchq_compat.qspecs.qparams import PerTensorQParams, QParams, covering
from torchq_compat.support.dtypes import LEGACY_DTYPES, dtype_name
from torchq_compat.support.quantized_tensors import as_float, of_integers

__all__ = ["OpaqueUserModule", "as_opaque_module", "as_users_module"]


class OpaqueUserModule(OpaqueModule):
    """A mixin for the class of a user's module, so that the graph can call the module.

    Attributes:
        opaque_path: the module's path in the model.
        opaque_takes_floats: whether the module gets its quantized inputs as floats; otherwise it gets
            quantized tensors, as in FX.
    """

    opaque_path: str
    opaque_takes_floats: bool
    #: The class the user wrote.
    opaque_users_class: type[nn.Module]

    def opaque_call(self, *args: Any, **kwargs: Any) -> Any:
        return super(OpaqueModule, self).forward(*args, **kwargs)

    def opaque_receive(self, q: Tensor, qparams: QParams) -> Tensor:
        if self.opaque_takes_floats:
            return super().opaque_receive(q, qparams)
        if not _has_legacy_dtype(qparams):
            raise UserModuleError(
                f"an input of {self.opaque_users_class.__qualname__} at {self.opaque_path!r} is "
                f"{dtype_name(qparams.dtype)}, which torch.ao's quantized tensors cannot "
                "hold.",
                hint="set takes_floats = True on the quantized class: it then gets floats.",
            )
        return _legacy_tensor(q, qparams)

    def opaque_hand_out(self, result: Tensor, qparams: QParams | None) -> Tensor:
        return super().opaque_hand_out(as_float(result), qparams)

    def opaque_check_results(self, layout: CallLayout, results: Any) -> None:
        found, _ = Structure.take_apart(results)
        if found != layout.outputs:
            raise UserModuleError.other_results(
                self.opaque_path, self.opaque_users_class, _shown(layout.outputs), _shown(found)
            )


class HeldGraphModule(OpaqueUserModule):
    """Holds a GraphModule that a user's class returned: each has its own class, which cannot be extended."""

    def __init__(self, held: GraphModule) -> None:
        nn.Module.__init__(self)
        self.held = held

    def opaque_call(self, *args: Any, **kwargs: Any) -> Any:
        return self.held(*args, **kwargs)


def as_opaque_module(module: nn.Module, path: str, *, takes_floats: bool) -> OpaqueUserModule:
    """Return ``module`` as an opaque module. Changes its class, unless it is a GraphModule."""
    users_class = type(module)
    opaque: Any = module
    if isinstance(module, GraphModule):
        opaque = HeldGraphModule(module)
    else:
        namespace = {"__module__": users_class.__module__, "__qualname__": users_class.__qualname__}
        opaque.__class__ = type(users_class.__name__, (OpaqueUserModule, users_class), namespace)
    opaque.opaque_users_class = users_class
    opaque.opaque_path = path
    opaque.opaque_takes_floats = takes_floats
    opaque.opaque_layouts = []
    assert isinstance(opaque, OpaqueUserModule)
    return opaque


def as_users_module(opaque: OpaqueUserModule) -> nn.Module:
    """Return the module as the user's class made it."""
    if isinstance(opaque, HeldGraphModule):
        return opaque.held
    users_class = opaque.opaque_users_class
    for name in (
        "opaque_users_class",
        "opaque_path",
        "opaque_takes_floats",
        "opaque_layouts",
        "opaque_observed_class",
    ):
        vars(opaque).pop(name, None)
    module: Any = opaque
    module.__class__ = users_class
    assert isinstance(module, nn.Module)
    return module


def _shown(structure: Structure) -> str:
    """Return a structure for messages, without dtypes."""
    return str(structure.put_together(["tensor"] * structure.count()))


def _has_legacy_dtype(qparams: QParams) -> bool:
    """Return whether quantized tensors have a dtype for the integers of ``qparams``: quint8, qint8 or
    qint32."""
    return qparams.dtype in LEGACY_DTYPES


def _legacy_tensor(q: Tensor, qparams: QParams) -> Tensor:
    """Return the torch.ao quantized tensor with the integers ``q``, which classes of legacy scripts accept.

    Values with several qparams (directions of a recurrent module) are quantized again with qparams that cover
    all, because hardly any quantized operator accepts per-channel activations.
    """
    if not isinstance(qparams, PerTensorQParams):
        whole = covering([piece for _, piece in qparams.runs])
        q, qparams = whole.quantize(qparams.dequantize(q)), whole
    return of_integers(q, qparams.scale, qparams.zero_point)
