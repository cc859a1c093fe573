"""A user's module as a leaf: the same object, of a subclass of its class that the graph can call flat.

So the module keeps its path, its state and its ``isinstance``; ``torch.nn.utils.parametrize`` adds
behaviour to a module in the same way.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule

from torchq_compat.custom_modules.user.legacy_tensors import has_legacy_dtype, legacy_tensor
from torchq_compat.errors import UserModuleError
from torchq_compat.opaque_calls.layouts import CallLayout, Structure
from torchq_compat.opaque_calls.opaque_module import LeafModule
from torchq_compat.qspecs.qparams import Grid

__all__ = ["UserLeaf", "as_leaf", "as_users_module"]


class UserLeaf(LeafModule):
    """What is added to the class of a user's module.

    Attributes:
        leaf_path: where the module stands in the model.
        leaf_takes_floats: whether the module gets its quantized inputs in floats; otherwise, as in FX, as
            quantized tensors.
    """

    leaf_path: str
    leaf_takes_floats: bool
    #: The class the user wrote.
    leaf_users_class: type[nn.Module]

    def leaf_call(self, *args: Any, **kwargs: Any) -> Any:
        return super(LeafModule, self).forward(*args, **kwargs)

    def leaf_receive(self, q: Tensor, grid: Grid) -> Tensor:
        if self.leaf_takes_floats:
            return super().leaf_receive(q, grid)
        if not has_legacy_dtype(grid):
            raise UserModuleError(
                f"an input of {self.leaf_users_class.__qualname__} at {self.leaf_path!r} is "
                f"{str(grid.dtype).removeprefix('torch.')}, which torch.ao's quantized tensors cannot "
                "hold.",
                hint="set takes_floats = True on the quantized class: it then gets floats on that grid.",
            )
        return legacy_tensor(q, grid)

    def leaf_hand_out(self, result: Tensor, grid: Grid | None) -> Tensor:
        return super().leaf_hand_out(result.dequantize() if result.is_quantized else result, grid)

    def leaf_check_results(self, layout: CallLayout, results: Any) -> None:
        found, _ = Structure.take_apart(results)
        if found != layout.outputs:
            raise UserModuleError.other_results(
                self.leaf_path, self.leaf_users_class, _shown(layout.outputs), _shown(found)
            )


class HeldGraphModule(UserLeaf):
    """A GraphModule a user's class returned: a graph's class is its own and cannot be added to."""

    def __init__(self, held: GraphModule) -> None:
        nn.Module.__init__(self)
        self.held = held

    def leaf_call(self, *args: Any, **kwargs: Any) -> Any:
        return self.held(*args, **kwargs)


def as_leaf(module: nn.Module, path: str, *, takes_floats: bool) -> UserLeaf:
    """``module`` as a leaf. Changes its class, unless it is a GraphModule."""
    users_class = type(module)
    leaf: Any = module
    if isinstance(module, GraphModule):
        leaf = HeldGraphModule(module)
    else:
        namespace = {"__module__": users_class.__module__, "__qualname__": users_class.__qualname__}
        leaf.__class__ = type(users_class.__name__, (UserLeaf, users_class), namespace)
    leaf.leaf_users_class = users_class
    leaf.leaf_path = path
    leaf.leaf_takes_floats = takes_floats
    leaf.leaf_layouts = []
    assert isinstance(leaf, UserLeaf)
    return leaf


def as_users_module(leaf: UserLeaf) -> nn.Module:
    """The module the user's class made, as it was."""
    if isinstance(leaf, HeldGraphModule):
        return leaf.held
    users_class = leaf.leaf_users_class
    for name in ("leaf_users_class", "leaf_path", "leaf_takes_floats", "leaf_layouts", "leaf_observed_class"):
        vars(leaf).pop(name, None)
    module: Any = leaf
    module.__class__ = users_class
    assert isinstance(module, nn.Module)
    return module


def _shown(structure: Structure) -> str:
    """A structure for people: its shape with dtypes left out."""
    return str(structure.put_together(["tensor"] * structure.count()))
