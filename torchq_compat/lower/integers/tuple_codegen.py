"""Codegen of a lowered graph whose inputs and results are tensors, tuples and lists, without pytree.

To flatten the arguments and rebuild the results, pytree takes longer than a small kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.fx.graph import CodeGen

from torchq_compat.support.upstream import PyTreeCodeGen, pytree

__all__ = ["without_pytree"]


def without_pytree(codegen: CodeGen) -> CodeGen:
    """Return ``codegen``, or a codegen for the same call that writes tuples and lists out."""
    info = getattr(codegen, "pytree_info", None)
    if type(codegen) is not PyTreeCodeGen or info is None or info.out_spec is None:
        return codegen
    args, kwargs = info.in_spec.children()
    if kwargs.num_leaves or not _is_plain(args) or not _is_plain(info.out_spec):
        return codegen
    return _TupleCodeGen(info)


class _TupleCodeGen(PyTreeCodeGen):
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

    def generate_output(
        self,
        output_args: Any,
        *,
        descs: Sequence[str] | None = None,
        repr_fn: Callable[[object], str] | None = None,
    ) -> str:
        show = repr if repr_fn is None else repr_fn
        spec = self.pytree_info.out_spec
        assert spec is not None
        return f"return {_written(spec, map(show, output_args))}"


def _is_plain(spec: pytree.TreeSpec) -> bool:
    if spec.is_leaf():
        return True
    return spec.type in (tuple, list) and spec.num_children > 0 and all(map(_is_plain, spec.children()))


def _written(spec: pytree.TreeSpec, leaves: Iterator[str]) -> str:
    if spec.is_leaf():
        return next(leaves)
    inside = "".join(f"{_written(child, leaves)}, " for child in spec.children())
    return f"[{inside}]" if spec.type is list else f"({inside})"
