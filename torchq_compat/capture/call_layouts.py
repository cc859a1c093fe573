"""Call layouts: how the nested arguments and results of one call map to flat tuples of named tensors."""

from __future__ import annotations

import dataclasses
import enum
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from torchq_compat.errors import InputError
from torchq_compat.read.qparams import QParams
from torchq_compat.support.upstream import pytree

# The outer graph has only tensors. FX rerouted tuples in the graph; here Python takes the nested structure
# of a call apart in front of the graph, and puts it together again behind it. pytree handles tuples, lists,
# dicts and named tuples; this module handles dataclasses, registered or not, and PackedSequence, whose
# constructor requires tensors.


class Field(str):
    """A key that is the name of a dataclass field, not an index."""

    __slots__ = ()


#: The fields of a PackedSequence except ``data``.
INDEX_FIELDS = PackedSequence._fields[1:]


class LeafKind(enum.Enum):
    """The kind of value at a leaf of a structure that is no constant."""

    TENSOR = "tensor"
    SIZE = "size"


@dataclass(frozen=True)
class Record:
    """An instance of a dataclass, or a PackedSequence: its class, its fields in order, and the structure of
    their values."""

    kind: type
    names: tuple[str, ...]
    values: Structure


@dataclass(frozen=True)
class Structure:
    """A nested structure without its tensors.

    Attributes:
        spec: the tree.
        leaves: for each leaf of the tree a ``LeafKind``, a ``Record``, or the constant itself.
    """

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]

    @classmethod
    def take_apart(cls, nested: Any) -> tuple[Structure, list[Tensor]]:
        """Return the structure of ``nested`` and its tensors in order."""
        structure, tensors, _ = cls.take_apart_with_sizes(nested)
        return structure, tensors

    @classmethod
    def take_apart_with_sizes(cls, nested: Any) -> tuple[Structure, list[Tensor], list[Any]]:
        """Return what ``take_apart`` does, and the sizes (``torch.SymInt``) that capture made symbolic."""
        tensors: list[Tensor] = []
        sizes: list[Any] = []
        return cls._take_apart(nested, tensors, sizes), tensors, sizes

    @classmethod
    def _take_apart(cls, nested: Any, tensors: list[Tensor], sizes: list[Any]) -> Structure:
        result, spec = pytree.tree_flatten(nested, is_leaf=_is_record)
        leaves: list[Any] = []
        for leaf in result:
            if isinstance(leaf, Tensor):
                tensors.append(leaf)
                leaves.append(LeafKind.TENSOR)
            elif isinstance(leaf, torch.SymInt):
                sizes.append(leaf)
                leaves.append(LeafKind.SIZE)
            elif _is_record(leaf):
                names = _field_names(leaf)
                values = cls._take_apart([getattr(leaf, name) for name in names], tensors, sizes)
                leaves.append(Record(type(leaf), names, values))
            else:
                leaves.append(leaf)
        return cls(spec, tuple(leaves))

    def __deepcopy__(self, memo: dict[int, Any]) -> Structure:
        """Return the structure itself: it is frozen, and copying its TreeSpec would warn inside torch."""
        return self

    def put_together(self, tensors: Any, sizes: Any = ()) -> Any:
        """Return the nested structure around ``tensors`` and ``sizes``, of any type, such as nodes."""
        return self._put_together(iter(tensors), iter(sizes))

    def _put_together(self, tensors: Iterator[Any], sizes: Iterator[Any]) -> Any:
        values = []
        for leaf in self.leaves:
            if leaf is LeafKind.TENSOR:
                values.append(next(tensors))
            elif leaf is LeafKind.SIZE:
                values.append(next(sizes))
            elif isinstance(leaf, Record):
                values.append(_make_record(leaf, leaf.values._put_together(tensors, sizes)))
            else:
                values.append(leaf)
        return pytree.tree_unflatten(values, self.spec)

    def constants(self) -> Iterator[Any]:
        """Yield the constants of the structure: all leaves that are neither tensors nor sizes."""
        for leaf in self.leaves:
            if isinstance(leaf, Record):
                yield from leaf.values.constants()
            elif not isinstance(leaf, LeafKind):
                yield leaf

    def holds_indices(self) -> list[bool]:
        """Return, for each tensor, whether it is a field of a PackedSequence other than ``data``."""
        last = [keys[-1] if keys else None for keys in self.tensor_keys()]
        return [isinstance(key, Field) and key in INDEX_FIELDS for key in last]

    def count(self, place: LeafKind = LeafKind.TENSOR) -> int:
        """Return the number of tensors, or of sizes, in the structure."""
        return sum(
            leaf.values.count(place) if isinstance(leaf, Record) else leaf is place for leaf in self.leaves
        )

    def tensor_keys(self) -> list[tuple[Any, ...]]:
        """Return, for each tensor, the indices, dict keys and field names that lead to it."""
        positions = pytree.tree_unflatten(list(range(len(self.leaves))), self.spec)
        matches: list[tuple[Any, ...]] = []
        for keys, index in _with_keys(positions):
            leaf = self.leaves[index]
            if leaf is LeafKind.TENSOR:
                matches.append(keys)
            elif isinstance(leaf, Record):
                inner = leaf.values.tensor_keys()
                matches.extend((*keys, Field(leaf.names[first]), *remaining) for first, *remaining in inner)
        return matches


def _with_keys(nested: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the keys and the value of each leaf of ``nested``; keys are indices in containers that are
    registered without names."""
    for path, leaf in pytree.tree_flatten_with_path(nested, is_leaf=_has_no_names)[0]:
        keys = tuple(_plain_key(key) for key in path)
        if not _has_no_names(leaf):
            yield keys, leaf
            continue
        children, _ = pytree.SUPPORTED_NODES[type(leaf)].flatten_fn(leaf)
        for index, child in enumerate(children):
            yield from (((*keys, index, *remaining), inner) for remaining, inner in _with_keys(child))


def _has_no_names(value: Any) -> bool:
    node = pytree.SUPPORTED_NODES.get(type(value))
    return node is not None and node.flatten_with_keys_fn is None


def _plain_key(key: Any) -> Any:
    if isinstance(key, pytree.SequenceKey):
        return key.idx
    return key.key if isinstance(key, pytree.MappingKey) else Field(key.name)


def _is_record(value: Any) -> bool:
    if isinstance(value, PackedSequence):
        return True
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _field_names(record: Any) -> tuple[str, ...]:
    if isinstance(record, PackedSequence):
        return record._fields
    return tuple(item.name for item in dataclasses.fields(record))


def _make_record(record: Record, values: list[Any]) -> Any:
    """Return an instance with ``values``, made without ``__init__``, which may change or refuse them."""
    if issubclass(record.kind, PackedSequence):
        return tuple.__new__(record.kind, values)
    result: Any = object.__new__(record.kind)
    for name, value in zip(record.names, values, strict=True):
        object.__setattr__(result, name, value)
    return result


@dataclass(frozen=True)
class CallLayout:
    """One call of a custom module.

    Attributes:
        inputs: the structure of ``(args, kwargs)``.
        outputs: the structure of the result.
        input_qparams: for each tensor input, the qparams if it arrives as integers, or None for floats.
        output_qparams: for each tensor output, the qparams if it leaves as integers, or None for floats.
        float_qparams: for each tensor input that arrives as floats, the qparams that represent these exactly,
            or None.
        ranks: for each tensor output, how many dimensions it has; empty if that cannot change with sizes.
    """

    inputs: Structure
    outputs: Structure
    input_qparams: tuple[QParams | None, ...] = field(default=())
    output_qparams: tuple[QParams | None, ...] = field(default=())
    float_qparams: tuple[QParams | None, ...] = field(default=())
    ranks: tuple[int, ...] = ()


def check_form(path: str, result: Any, layouts: Iterable[CallLayout]) -> None:
    """Raise if the ``result`` of the module at ``path`` has another form than in all of its ``layouts``.

    Raises:
        InputError: it is nested otherwise, or a tensor in it has another number of dimensions.
    """
    structure, tensors = Structure.take_apart(result)
    ranks = tuple(tensor.dim() for tensor in tensors)
    layout = None
    for layout in layouts:
        if structure == layout.outputs and (ranks == layout.ranks or not layout.ranks):
            return
    if layout is not None:
        shown, expected = _shown(structure, ranks), _shown(layout.outputs, layout.ranks)
        raise InputError.of("TQ901.other_form", path=path, result=shown, expected=expected)


def _shown(structure: Structure, ranks: tuple[int, ...]) -> str:
    names = [f"a tensor of {rank} dimensions" for rank in ranks] or ["a tensor"] * structure.count()
    return str(structure.put_together(names)).replace("'", "")


# Names for the flat tensors of a call (``x``, ``batch.mask``) and of a result (``0``, ``logits``).


def input_labels(owner: type[nn.Module], inputs: Structure) -> list[str]:
    """Return a label for each tensor of ``(args, kwargs)``: the parameter of ``owner.forward``, then the keys
    inside it."""
    names = _positional_names(owner)
    labels = []
    for place, first, *remaining in inputs.tensor_keys():
        name = names[first] if place == 0 and first < len(names) else str(first)
        labels.append(".".join([name, *map(str, remaining)]))
    return labels


def output_labels(outputs: Structure) -> list[str]:
    """Return a label for each tensor of a result, the keys that lead to it; empty for a single tensor."""
    return [".".join(map(str, keys)) for keys in outputs.tensor_keys()]


def most_specific(settings: dict[str, Any], label: str) -> str | None:
    """Return the longest key of ``settings`` that is ``label`` or a prefix of its path, or None."""
    matching = [key for key in settings if label == key or label.startswith(f"{key}.")]
    return max(matching, key=len, default=None)


def _positional_names(owner: type[nn.Module]) -> list[str]:
    if issubclass(owner, torch.jit.ScriptModule):
        return []  # Only its instances have a forward.
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(owner.forward).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind in kinds][1:]
