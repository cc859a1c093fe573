"""The lowered graph while it is written: a copy of the reference graph, and its own constants."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from torchq_compat.lower.integers.operators import DEQUANTIZE, QUANTIZE
from torchq_compat.lower.integers.tuple_codegen import without_pytree
from torchq_compat.qspecs.qparams import PerTensorQParams

__all__ = ["MADE", "LoweredGraph", "Made", "is_signed", "numbers_of", "share_state", "with_modules"]

#: The attribute of a lowered module that holds what its graph reads beside the state of the reference.
MADE = "lowered"
#: The metadata of a node that point to the user's code.
ORIGIN_KEYS = ("stack_trace", "nn_module_stack", "torch_fn", "source_fn_stack", "from_node")
STATE = ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules")


class LoweredGraph:
    """A graph that is rewritten in place.

    Attributes:
        graph: a copy of the graph of ``reference``, whose state it reads.
        constants: name -> tensor, read as attributes of ``MADE``.
    """

    def __init__(self, reference: GraphModule) -> None:
        self.reference = reference
        self.graph = Graph()
        self.origins: dict[Node, Node] = {}
        returned = self.graph.graph_copy(reference.graph, self.origins)
        output = reference.graph.output_node()
        self.graph.output(returned).meta = dict(output.meta)
        self.graph.set_codegen(without_pytree(reference.graph._codegen))
        self.constants: dict[str, Tensor] = {}
        self._origin: dict[str, Any] = {}

    @contextmanager
    def before(self, node: Node) -> Iterator[None]:
        """Write calls before ``node``, with the origin of ``node`` in the user's code."""
        self._origin = {key: node.meta[key] for key in ORIGIN_KEYS if key in node.meta}
        with self.graph.inserting_before(node):
            yield

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """Write a call at the insertion point."""
        written = self.graph.call_function(target, args, kwargs)
        written.meta.update(self._origin)
        return written

    def constant(self, value: Tensor) -> Node:
        """Write a read of ``value`` at the insertion point."""
        name = f"constant_{len(self.constants)}"
        self.constants[name] = value.detach()
        # Not graph.get_attr, which looks for the attribute on a module that does not have it yet.
        return self.graph.create_node("get_attr", f"{MADE}.{name}")

    def quantize(self, floats: Any, qparams: PerTensorQParams) -> Node:
        """Write the quantize of ``floats``."""
        return self.call(QUANTIZE, floats, *numbers_of(qparams), is_signed(qparams))

    def dequantize(self, integers: Any, qparams: PerTensorQParams) -> Node:
        """Write the dequantize of ``integers``."""
        return self.call(DEQUANTIZE, integers, qparams.scale, qparams.zero_point)


def is_signed(qparams: PerTensorQParams) -> bool:
    """Return whether the integers of ``qparams`` are int8, not uint8."""
    return bool(qparams.dtype.is_signed)


def numbers_of(qparams: PerTensorQParams) -> tuple[float, int, int, int]:
    """Return the qparams as the operators take them: scale, zero point, lowest and highest integer."""
    return qparams.scale, qparams.zero_point, qparams.quant_min, qparams.quant_max


class Made(nn.Module):
    """The constants of a lowered graph, as buffers that are in no state_dict."""

    def __init__(self, constants: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, value in constants.items():
            self.register_buffer(name, value, persistent=False)


def share_state(module: nn.Module, reference: nn.Module) -> None:
    """Give ``module`` the parameters, buffers and submodules of ``reference`` themselves, not copies."""
    vars(module).update({name: vars(reference)[name] for name in STATE})


def with_modules(module: nn.Module, modules: Mapping[str, nn.Module]) -> dict[str, nn.Module | None]:
    """Return the submodules of ``module`` with ``modules`` (path -> module) in place of its own.

    What is on the way to them is copied, and shares its state.
    """
    made = dict(module._modules)
    inside: dict[str, dict[str, nn.Module]] = {}
    for path, replacement in modules.items():
        first, _, rest = path.partition(".")
        if rest:
            inside.setdefault(first, {})[rest] = replacement
        else:
            made[first] = replacement
    for first, replacements in inside.items():
        own = module._modules[first]
        assert own is not None
        copied = type(own).__new__(type(own))
        vars(copied).update(vars(own))
        vars(copied)["_modules"] = with_modules(own, replacements)
        made[first] = copied
    return made
