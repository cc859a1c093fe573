"""State dicts that FX saved, in one form; older versions and packed weights are converted."""

import io
import os
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchq_compat.errors import CheckpointError
from torchq_compat.support import quantized_tensors
from torchq_compat.support.argument_checks import listed, shown

# Weights in the forms in which FX's converted models save them, as floats with their qparams.
#
# The forms are quantized tensors, pairs of a linear's weight and bias, and packed objects of such pairs.


@dataclass(frozen=True)
class FxWeight:
    """A weight with the values that its integers represent.

    Attributes:
        values: float32, the dequantized integers.
        scale: of shape (n,), one or one for each channel; None for half precision.
        zero_point: like ``scale``; floats for embeddings.
    """

    values: Tensor
    scale: Tensor | None = None
    zero_point: Tensor | None = None


def weight_of_tensor(tensor: Tensor) -> FxWeight:
    """Return ``tensor``, quantized or in half precision, as an FxWeight."""
    if not quantized_tensors.is_quantized(tensor):
        return FxWeight(tensor.detach().float())
    values = quantized_tensors.as_float(tensor).float()
    if quantized_tensors.is_per_channel(tensor) or quantized_tensors.has_float_qparams(tensor):
        # embedding_bag_unpack returns a tensor whose scales are in the memory of the packed object.
        scales, zero_points = quantized_tensors.channel_qparams(tensor)
        return FxWeight(values, scales.float().clone(), zero_points.clone())
    scale, zero_point = quantized_tensors.qparams_of(tensor)
    return FxWeight(values, torch.tensor([scale]), torch.tensor([zero_point]))


def unpacked_pair(packed: Any) -> tuple[FxWeight, Tensor | None]:
    """Return (weight, bias) of a packed linear, convolution or embedding.

    Raises:
        ValueError: ``packed`` is another kind of object.
    """
    kind = _kind(packed)
    if "Embedding" in kind:
        return weight_of_tensor(quantized_tensors.KERNELS.embedding_bag_unpack(packed)), None
    if "Linear" in kind:
        weight, bias = packed.__getstate__()[0]
    elif "Conv" in kind:
        weight, bias = packed.unpack()
    else:
        raise ValueError(f"{kind} is no packed weight")
    return weight_of_tensor(weight), bias


def unpacked_cell(packed: Any) -> dict[str, FxWeight | Tensor]:
    """Return "weight_ih", "bias_ih", "weight_hh" and "bias_hh" of one direction of one layer of a dynamic
    LSTM or GRU.

    Raises:
        ValueError: ``packed`` is another kind of object.
    """
    if "CellParams" not in _kind(packed):
        raise ValueError(f"{_kind(packed)} is no packed cell")
    _, biases, _, _, linears = packed.__getstate__()[0]
    entries: dict[str, FxWeight | Tensor] = {}
    for index, (which, linear) in enumerate(zip(("ih", "hh"), linears, strict=True)):
        entries[f"weight_{which}"], bias = unpacked_pair(linear)
        # Quantized cells store the biases beside the linears.
        bias = biases[index] if biases else bias
        if bias is not None:
            entries[f"bias_{which}"] = bias
    return entries


def _kind(packed: Any) -> str:
    return str(packed._type())


# A state dict of FX as named entries in one form: older versions and packed weights are converted.
#
# The version rules are those of ``_load_from_state_dict`` in torch.ao's observers, fused conv-bn modules and
# packed linears.


WEIGHT_QPARAM = re.compile(r"_(axis|qscheme|dtype|quant_min|quant_max|axis_int)$")
#: The scales of a converted graph.
SCALE_NAME = re.compile(r"^(?P<prefix>.*)_scale_(?P<index>\d+)$")
PACKED_NAME = re.compile(r"_packed_weight_\d+$")
CONV_BN_V1 = {
    "gamma": "bn.weight",
    "beta": "bn.bias",
    **{name: f"bn.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")},
}


@dataclass(frozen=True)
class Entry:
    """A value of a state, and the keys it was saved under."""

    value: Tensor | FxWeight
    keys: tuple[str, ...]


class FxState:
    """The entries of a result of FX's ``state_dict()`` by their names in a float or prepared model; reading
    an entry marks it as taken.

    Attributes:
        is_converted: whether the model was converted, so that it has integers and no observers.
        is_lowered: whether its weights are packed or quantized tensors.
        functional_weights: packed weights of functions, in the order of the graph.

    Raises:
        CheckpointError: values that are neither tensors nor objects FX saves; names all of them.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.state = _in_current_form(state)
        self.entries: dict[str, Entry] = {}
        self.functional_weights: dict[str, Entry] = {}
        self.is_converted = False
        self._taken: set[str] = set()
        self._refused: list[str] = []
        for name, value in self.state.items():
            self._read(name, value)
        # A quantized batch norm has float weights, but the scale of its output.
        modules = (
            name.removesuffix(".scale")
            for name in self.entries
            if name.endswith(".scale") and f"{name.removesuffix('scale')}zero_point" in self.entries
        )
        self.is_lowered = self.is_converted or not all(_is_in_observer(path) for path in modules)
        if self._refused:
            refused = listed([f"{name} ({shown(self.state[name])})" for name in self._refused])
            raise CheckpointError.of("TQ960.unknown_values", result=refused)
        self._join_reference_weights()
        # The scale of a quantized module, or of a former quantize operator.
        if any(SCALE_NAME.match(name) for name in self.entries):
            self.is_converted = True

    def take(self, names: Iterable[str]) -> tuple[str, Entry] | None:
        """Return the first of ``names`` that exists, and its entry; None if none exists."""
        for name in names:
            if name in self.entries:
                self._taken.add(name)
                return name, self.entries[name]
        return None

    def take_under(self, prefix: str) -> dict[str, Tensor]:
        """Return the tensors below ``prefix``, by the rest of their names."""
        result = {
            name.removeprefix(f"{prefix}."): entry.value
            for name, entry in self.entries.items()
            if name.startswith(f"{prefix}.") and isinstance(entry.value, Tensor)
        }
        self._taken.update(f"{prefix}.{name}" for name in result)
        return result

    def forgive(self, name: str) -> None:
        """Mark ``name`` as taken: it need not have a place in our model."""
        self._taken.add(name)

    def left(self) -> list[str]:
        """Return the keys of all entries that were not taken."""
        entries = {**self.entries, **self.functional_weights}
        return sorted(
            {key for name, entry in entries.items() if name not in self._taken for key in entry.keys}
        )

    def untaken(self) -> Iterator[tuple[str, Entry]]:
        return ((name, entry) for name, entry in self.entries.items() if name not in self._taken)

    def observers_at(self, prefix: str) -> list[str]:
        """Return the ``<prefix>activation_post_process_<k>`` that have a state, in the order FX made them."""
        pattern = re.compile(re.escape(prefix) + r"activation_post_process_(\d+)\.")
        result = {int(match[1]) for name in self.entries if (match := pattern.match(name))}
        return [f"{prefix}activation_post_process_{index}" for index in sorted(result)]

    def named_observers_at(self, prefix: str) -> list[str]:
        """Return the ``<prefix><name of a node>_activation_post_process_<k>``, FX's names before torch 1.12,
        in the order of its graph."""
        pattern = re.compile(re.escape(prefix) + r"[^.]+_activation_post_process_\d+(?=\.)")
        return list(dict.fromkeys(match[0] for name in self.entries if (match := pattern.match(name))))

    def scales_at(self, prefix: str) -> list[str]:
        """Return the names of the scales of a converted graph at ``prefix``, in the order of the graph."""
        names = (name for name in self.entries if name.startswith(prefix))
        return [name for name in names if "." not in name[len(prefix) :] and SCALE_NAME.match(name)]

    @property
    def is_reference(self) -> bool:
        """Whether the model was converted with quantize operators only, so that each has its qparams."""
        return self.is_converted and not self.is_lowered

    def fingerprint(self, name: str) -> tuple[object, ...]:
        """Return a value that is equal for observers, or scales with zero points, of equal content."""
        names = [entry for entry in self.entries if entry.startswith(f"{name}.")] or list(self.qparams(name))
        values = (self.entries[item].value for item in sorted(names) if item in self.entries)
        return tuple(
            (tuple(value.shape), *value.flatten().tolist()) for value in values if isinstance(value, Tensor)
        )

    def scales(self) -> list[str]:
        """Return the names of all scales, of graphs and of quantized modules."""
        return [
            name
            for name in self.entries
            if (SCALE_NAME.match(name) or name.endswith(".scale")) and self.qparams(name)[1] in self.entries
        ]

    def values_of(self, scale_name: str) -> tuple[Tensor, Tensor] | None:
        """Return a scale and its zero point; None if either is missing."""
        scale, zero_point = (self.entries.get(name) for name in self.qparams(scale_name))
        if scale is None or zero_point is None:
            return None
        if isinstance(scale.value, FxWeight) or isinstance(zero_point.value, FxWeight):
            return None
        return scale.value, zero_point.value

    def qparams(self, scale_name: str) -> tuple[str, str]:
        """Return the names of a scale and its zero point."""
        return scale_name, re.sub(r"scale(?=(_\d+)?$)", "zero_point", scale_name)

    def _add(self, name: str, value: Tensor | FxWeight | None, *keys: str) -> None:
        if value is not None:
            self.entries[name] = Entry(value.detach() if isinstance(value, Tensor) else value, keys)

    def _read(self, name: str, value: Any) -> None:
        if isinstance(value, Tensor) and not quantized_tensors.is_quantized(value):
            self._add(name, value, name)
        elif isinstance(value, Tensor):
            self.is_converted = True
            self._add(
                re.sub(r"(^|\.)_packed_params\._packed_weight$", r"\1weight", name),
                weight_of_tensor(value),
                name,
            )
        elif isinstance(value, torch.ScriptObject):
            self._read_packed(name, value)
        elif name.endswith("_packed_params._packed_params") and isinstance(value, (tuple, list)):
            self.is_converted = True
            prefix = name.removesuffix("_packed_params._packed_params")
            weight, bias = value
            self._add(f"{prefix}weight", weight_of_tensor(weight), name)
            self._add(f"{prefix}bias", bias, name)
        elif value is not None and not isinstance(value, (torch.dtype, torch.qscheme, int, float, bool)):
            self._refused.append(name)

    def _read_packed(self, name: str, value: Any) -> None:
        self.is_converted = True
        try:
            if name.endswith(".param") and "_all_weight_values." in name:
                for part, content in unpacked_cell(value).items():
                    self._add(f"{name.removesuffix('.param')}.{part}", content, name)
            elif re.search(r"(^|\.)_packed_weight_(ih|hh)$", name):
                weight, bias = unpacked_pair(value)
                self._add(name.replace("_packed_weight_", "weight_"), weight, name)
                self._add(name.replace("_packed_weight_", "bias_"), bias, name)
            elif PACKED_NAME.search(name):
                weight, bias = unpacked_pair(value)
                self.functional_weights[name] = Entry(weight, (name,))
                if bias is not None:
                    self.functional_weights[f"{name}:bias"] = Entry(bias, (name,))
            else:
                self._refused.append(name)
        except (ValueError, RuntimeError, AttributeError):
            self._refused.append(name)

    def _join_reference_weights(self) -> None:
        """Join the float weight of a reference module with ``<name>_scale`` and its other qparams."""
        for name in list(self.entries):
            weight = self.entries[name].value if name in self.entries else None
            scale, zero_point = (self.entries.get(f"{name}_{what}") for what in ("scale", "zero_point"))
            if not isinstance(weight, Tensor) or scale is None or zero_point is None:
                continue
            self.is_converted = True
            beside = [f"{name}_scale", f"{name}_zero_point"]
            _check_weight(name, weight, scale.value, zero_point.value)
            axis = self.entries.get(f"{name}_axis")
            beside += [
                other
                for other in self.entries
                if other.startswith(f"{name}_") and WEIGHT_QPARAM.search(other)
            ]
            at = int(axis.value) if axis is not None and isinstance(axis.value, Tensor) else 0
            quantized = scale.value, zero_point.value, at, self.state.get(f"{name}_dtype")
            value = _reference_weight(weight.float(), *quantized)
            for other in beside:
                self.entries.pop(other, None)
            self.entries[name] = Entry(value, (name, *beside))


def _in_current_form(state: Mapping[str, Any]) -> dict[str, Any]:
    current: dict[str, Any] = {}
    gammas = {name.removesuffix("gamma") for name in state if re.search(r"(^|\.)gamma$", name)}
    # A user's own layer may have a gamma as well, but not the other entries of a batch norm.
    conv_bn_v1 = {
        prefix
        for prefix in gammas
        if all(f"{prefix}{item}" in state for item in CONV_BN_V1 if item != "num_batches_tracked")
    }
    for name, value in state.items():
        prefix, _, last = name.rpartition(".")
        prefix = f"{prefix}." if prefix else ""
        if last in ("min_vals", "max_vals"):
            # MinMaxObserver and related observers, before version 3.
            name = f"{prefix}{last[:-1]}"
        elif prefix in conv_bn_v1 and last in CONV_BN_V1:
            # nn.intrinsic.qat, version 1.
            name = f"{prefix}{CONV_BN_V1[last]}"
        elif re.search(r"(^|\.)_packed_params\.(weight|bias)$", name):
            # LinearPackedParams before version 3.
            name = re.sub(r"_packed_params\.(weight|bias)$", r"\1", name)
        current[name] = value
    return current


def _check_weight(name: str, weight: Tensor, scale: Any, zero_point: Any) -> None:
    """Refuse a weight that cannot be quantized."""
    if weight.is_meta or scale.is_meta or zero_point.is_meta:
        raise CheckpointError.bad_value(name, "is a meta tensor, which has no values")
    if not bool(weight.isfinite().all()):
        raise CheckpointError.bad_value(name, "holds NaN or infinity")
    if not bool((scale.isfinite() & (scale > 0)).all()):
        raise CheckpointError.bad_value(f"{name}_scale", "holds a scale that is no positive number")


def _reference_weight(
    weight: Tensor, scale: Any, zero_point: Any, axis: int, dtype: torch.dtype | None
) -> FxWeight:
    """Return a float weight quantized with its stored qparams, as the reference module quantizes it."""
    dtype = torch.qint8 if dtype is None else dtype
    if dtype is torch.float16:
        return FxWeight(weight.half().float())
    if scale.numel() == 1 and not zero_point.is_floating_point():
        return weight_of_tensor(quantized_tensors.quantize(weight, float(scale), int(zero_point), dtype))
    return weight_of_tensor(quantized_tensors.quantize_per_channel(weight, scale, zero_point, axis, dtype))


def _is_in_observer(path: str) -> bool:
    names = (re.sub(r"_\d+$", "", part) for part in path.split("."))
    return any(name == "weight_fake_quant" or name.endswith("activation_post_process") for name in names)


# Find the entries of a checkpoint file that ``torch.load(weights_only=True)`` does not load.
#
# The file is read without creating any of its objects: each is replaced by a stand-in that does nothing.


class _StandIn:
    """Takes the place of an object that is not created."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass


class _PackedStandIn(_StandIn):
    """Takes the place of a packed object."""


class _NameReader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        return _PackedStandIn if (module, name) == ("torch", "ScriptObject") else _StandIn

    def persistent_load(self, _: Any) -> Any:
        return _StandIn()


def packed_names(path: str | os.PathLike[str]) -> list[str]:
    """Return the names of the packed objects in the state at ``path``; empty if the file is unreadable."""
    try:
        with zipfile.ZipFile(path) as archive:
            name = next(item for item in archive.namelist() if item.endswith("data.pkl"))
            content = _NameReader(io.BytesIO(archive.read(name))).load()
    except Exception:  # Any failure is ignored: the names only improve an error message.
        return []
    if not isinstance(content, Mapping):
        return []
    return [str(key) for key, value in content.items() if isinstance(value, _PackedStandIn)]
