"""The lowered graph while it is written, and what a rule answers about an op."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import CodeGen

from torchq_compat.lower.integers.operators import DEQUANTIZE, QUANTIZE
from torchq_compat.lower.integers.qdq_graph import OpSite
from torchq_compat.model.quantized_interface import StructuredCodeGen
from torchq_compat.read.qparams import PerTensorQParams
from torchq_compat.support.upstream import pytree

# Codegen of a lowered graph whose inputs are tensors, tuples and lists, without pytree, which takes longer to
# flatten them than a small kernel.


def without_pytree(codegen: CodeGen) -> CodeGen:
    """Return ``codegen``, or a codegen for the same call that writes tuples and lists out."""
    if not isinstance(codegen, StructuredCodeGen):
        return codegen
    args, kwargs = codegen.pytree_info.in_spec.children()
    return codegen if kwargs.num_leaves or not _is_plain(args) else _TupleCodeGen(codegen.pytree_info)


class _TupleCodeGen(StructuredCodeGen):
    def gen_var_bindings(self, fn_args: list[str], free_vars: list[str], expanded_def: bool) -> str:
        names = (name.split(":")[0].split("#")[0].strip() for name in free_vars if name != "self")
        arguments = [argument for argument in self.pytree_info.orig_args if argument != "self"]
        specs = self.pytree_info.in_spec.child(0).children()
        lines = ""
        for argument, spec in zip(arguments, specs, strict=True):
            written = _written(spec, names)
            if written != argument:
                lines += f"\n    {written} = {argument}"
        return lines


def _is_plain(spec: pytree.TreeSpec) -> bool:
    if spec.is_leaf():
        return True
    return spec.type in (tuple, list) and spec.num_children > 0 and all(map(_is_plain, spec.children()))


def _written(spec: pytree.TreeSpec, leaves: Iterator[str]) -> str:
    if spec.is_leaf():
        return next(leaves)
    inside = "".join(f"{_written(child, leaves)}, " for child in spec.children())
    return f"[{inside}]" if spec.type is list else f"({inside})"


# The lowered graph while it is written: a copy of the reference graph, and its own constants.


#: The attribute of a lowered module that holds what its graph reads beside the state of the reference.
CONSTANTS = "lowered"
#: The metadata of a node that point to the user's code.
ORIGIN_KEYS = ("stack_trace", "nn_module_stack", "torch_fn", "source_fn_stack", "from_node")
STATE = ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules")


def origin_of(node: Node) -> dict[str, Any]:
    """Return the metadata of ``node`` that point to the user's code."""
    return {key: node.meta[key] for key in ORIGIN_KEYS if key in node.meta}


class LoweredGraph:
    """A graph that is rewritten in place.

    Attributes:
        graph: a copy of the graph of ``reference``, whose state it reads.
        constants: name -> tensor, read as attributes of ``CONSTANTS``.
    """

    def __init__(self, reference: GraphModule) -> None:
        self.reference = reference
        self.graph = Graph()
        self.origins: dict[Node, Node] = {}
        returned = self.graph.graph_copy(reference.graph, self.origins)
        self.graph.output(returned).meta = dict(reference.graph.output_node().meta)
        self.graph.set_codegen(without_pytree(reference.graph._codegen))
        self.constants: dict[str, Tensor] = {}
        self._origin: dict[str, Any] = {}

    @contextmanager
    def before(self, node: Node) -> Iterator[None]:
        """Write calls before ``node``, with the origin of ``node`` in the user's code."""
        self._origin = origin_of(node)
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
        return self.graph.create_node("get_attr", f"{CONSTANTS}.{name}")

    def quantize(self, floats: Any, qparams: PerTensorQParams) -> Node:
        """Write the quantize of ``floats``."""
        return self.call(QUANTIZE, floats, *of_result(qparams))

    def dequantize(self, integers: Any, qparams: PerTensorQParams) -> Node:
        """Write the dequantize of ``integers``."""
        return self.call(DEQUANTIZE, integers, qparams.scale, qparams.zero_point)


def of_result(qparams: PerTensorQParams) -> tuple[float, int, int, int, bool]:
    """Return the qparams of a result as the operators take them: scale, zero point, lowest and highest
    integer, and whether it is int8, not uint8."""
    scale, zero_point, low, high, dtype = qparams.arguments()
    return scale, zero_point, low, high, dtype.is_signed


class Constants(nn.Module):
    """The constants of a lowered graph, as buffers that are in no state_dict."""

    def __init__(self, constants: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.training = False
        for name, value in constants.items():
            self.register_buffer(name, value, persistent=False)


def share_state(module: nn.Module, reference: nn.Module) -> None:
    """Give ``module`` the parameters, buffers and submodules of ``reference`` themselves, not copies."""
    vars(module).update({name: vars(reference)[name] for name in STATE})


def with_modules(module: nn.Module, modules: Mapping[str, nn.Module]) -> dict[str, nn.Module | None]:
    """Return the submodules of ``module`` with ``modules`` (path -> module) in place of its own.

    What is on the way to them is copied, and shares its state.
    """
    result = dict(module._modules)
    inside: dict[str, dict[str, nn.Module]] = {}
    for path, replacement in modules.items():
        first, _, remaining = path.partition(".")
        if remaining:
            inside.setdefault(first, {})[remaining] = replacement
        else:
            result[first] = replacement
    for first, replacements in inside.items():
        own = module._modules[first]
        assert own is not None
        copied = type(own).__new__(type(own))
        vars(copied).update(vars(own))
        vars(copied)["_modules"] = with_modules(own, replacements)
        result[first] = copied
    return result


# The answers of rules: how an op runs on integers, or the reason why it does not.


@dataclass(frozen=True)
class Kernel:
    """How an op runs on integers.

    Attributes:
        name: shown to users.
        write: write it before the op; return the node that holds the integers of ``OpSite.result``, or its
            floats if they are not quantized.
        note: shown to users after the name.
        value: the node whose value it computes; None: ``OpSite.result.last``.
        is_as_reference: whether its value is that of the reference.
    """

    name: str
    write: Callable[[LoweredGraph], Node]
    note: str = ""
    value: Node | None = None
    is_as_reference: bool = True


@dataclass(frozen=True)
class Refusal:
    """Why an op does not run on integers; ``warn``: whether the user would be misled without a warning."""

    reason: str
    warn: bool = False


#: Return the answer for a site; None to leave it to other rules.
Rule = Callable[[OpSite], Kernel | Refusal | None]


@dataclass(frozen=True)
class Family:
    """The rules that one file of this folder declares: operator -> the rule for its calls."""

    rules: Mapping[Any, Rule]
