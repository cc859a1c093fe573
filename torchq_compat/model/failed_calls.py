"""Explain failed calls of captured models: which argument differs from the example, and which op failed."""

import linecache
import operator
import traceback
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from torchq_compat.capture.sizes.input_sizes import Dimension
from torchq_compat.codes import error_line
from torchq_compat.errors import CallError, InputError
from torchq_compat.support.argument_checks import shown
from torchq_compat.support.dtypes import dtype_name
from torchq_compat.support.graph_nodes import module_path_of
from torchq_compat.support.upstream import pytree

#: What kernels and generated code raise on arguments that do not fit; a MemoryError has another cause.
FAILURES = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def explain_failed_call(
    model: Any, stage: str, args: tuple[Any, ...], cause: BaseException
) -> CallError | None:
    """Return the error for the user; None if ``cause`` does not come from the arguments.

    Args:
        model: the model whose graph has the example's values on its placeholders.
        stage: "prepared" or "converted".
    """
    if isinstance(cause, (RecursionError, torch.OutOfMemoryError)) or type(cause) is InputError:
        return None  # An InputError says itself what is wrong.
    placeholders = model.graph.find_nodes(op="placeholder")
    expected = [(str(node.target), node.meta.get("val")) for node in placeholders]
    given = pytree.tree_leaves(args)
    sizes = model.record.signature.sizes.of_placeholders(model.graph)
    problem = next(_differences(expected, given, sizes), "")
    required = ", ".join(
        f"{name}: {_described(value, dimensions)}"
        for (name, value), dimensions in zip(expected, sizes, strict=True)
    )
    where, line = _place(cause), error_line(cause)
    keys = {"DTensor": "TQ904.sharded", "BFloat16": "TQ904.half", "Half": "TQ904.half"}
    return CallError.of(
        next((key for word, key in keys.items() if word in line), "TQ904.failed"),
        stage=stage,
        where=f" at {where}" if where else "",
        problem=f"{problem}; " if problem else "",
        cause=cause,
        expected=required,
    )


def check_structure(model: GraphModule, args: tuple[Any, ...]) -> None:
    """Refuse elements and keys that the example did not have; the generated code would ignore them.

    Raises:
        CallError: ``args`` hold another number of values, or another nesting, than the example of ``model``.
    """
    info = getattr(model.graph._codegen, "pytree_info", None)
    if info is None:
        return
    count = len(pytree.tree_leaves(args))
    if count != info.in_spec.num_leaves:
        raise CallError.of("TQ904.count", count=count, expected=info.in_spec.num_leaves)
    if not _has_nesting(info.in_spec.child(0), args):
        raise CallError.of("TQ904.nesting")


def _has_nesting(spec: pytree.TreeSpec, args: Any) -> bool:
    """Return whether ``args`` are nested as ``spec``, which may have classes that say so themselves."""
    if not _is_of_tuples(spec):
        return True
    if spec.is_leaf() or type(args) not in (tuple, list):
        return spec.is_leaf() and type(args) not in (tuple, list, dict)
    return len(args) == spec.num_children and all(map(_has_nesting, spec.children(), args))


def _is_of_tuples(spec: pytree.TreeSpec) -> bool:
    """Return whether ``spec`` has nothing but tuples and lists around its leaves."""
    return spec.is_leaf() or (spec.type in (tuple, list) and all(map(_is_of_tuples, spec.children())))


def has_example_dtypes(model: GraphModule, args: tuple[Any, ...]) -> bool:
    """Return whether the tensors among ``args`` have the dtypes of the example of ``model``, or other floats
    in place of floats."""
    examples = [node.meta.get("val") for node in model.graph.find_nodes(op="placeholder")]
    return all(
        value.dtype is example.dtype or (value.is_floating_point() and example.is_floating_point())
        for value, example in zip(pytree.tree_leaves(args), examples, strict=False)
        if isinstance(value, Tensor) and isinstance(example, Tensor)
    )


def _differences(
    expected: list[tuple[str, Any]], given: list[Any], sizes: list[tuple[Dimension, ...]]
) -> Iterator[str]:
    """Yield the differences of ``given`` from the example, argument by argument."""
    if len(expected) != len(given):
        yield f"its arguments hold {len(given)} values where the example held {len(expected)}"
        return
    for (name, example), value, dimensions in zip(expected, given, sizes, strict=True):
        if not isinstance(example, Tensor):
            continue
        if not isinstance(value, Tensor):
            yield f"argument {name!r} must be a tensor, got {shown(value)}"
        elif value.dim() != example.dim():
            yield f"argument {name!r} has {value.dim()} dimensions where the example had {example.dim()}"
        elif value.dtype != example.dtype:
            yield f"argument {name!r} is {value.dtype} where the example was {example.dtype}"
        elif value.device != example.device:
            yield f"argument {name!r} is on {value.device} where the example was on {example.device}"
        else:
            for size, dimension in zip(value.shape, dimensions, strict=False):
                if dimension.is_fixed and size != dimension.example:
                    where = f"in dimension {dimension.index}, the example {dimension.example}"
                    yield f"argument {name!r} has size {size} {where}"


def _described(value: Any, dimensions: Iterable[Dimension]) -> str:
    if not isinstance(value, Tensor):
        return "None" if value is None else type(value).__name__
    sizes = ", ".join(str(dimension.example) if dimension.is_fixed else "any" for dimension in dimensions)
    return f"{dtype_name(value.dtype)} ({sizes})"


def _place(cause: BaseException) -> str:
    """Return the node that failed, with the module path around it: "'encoder.fc' (linear)"."""
    paths: list[str] = []
    operation = ""
    for frame, line in traceback.walk_tb(cause.__traceback__):
        owner = frame.f_locals.get("self")
        if not isinstance(owner, GraphModule) or "eval_with_key" not in frame.f_code.co_filename:
            continue
        code = linecache.getline(frame.f_code.co_filename, line)
        name = code.partition("=")[0].partition(":")[0].strip()
        node = next((node for node in owner.graph.nodes if node.name == name), None)
        if node is not None:
            operation = node.name
            paths.append(_path(node))
    path = ".".join(filter(None, paths))
    return f"{path!r} ({operation})" if path else operation


def _path(node: Node) -> str:
    if node.op == "call_module":
        return str(node.target)
    path = module_path_of(node)
    # A node inserted for an op has no module path of its own: use the path of that op.
    if not path and any(word in str(node.target) for word in ("quantize_per", "choose_qparams")):
        return next(filter(None, map(_path_of_reader, node.users)), "")
    return path


def _path_of_reader(node: Node) -> str:
    is_result = node.target is operator.getitem
    return next(filter(None, map(_path, node.users)), "") if is_result else _path(node)
