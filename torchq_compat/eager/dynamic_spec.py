"""Read ``qconfig_spec`` of ``quantize_dynamic`` into the QConfig of every module, by path."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from torchq_compat.errors import ConfigError
from torchq_compat.support.argument_checks import shown
from torchq_compat.support.torch_ao import (
    QConfig,
    default_dynamic_qconfig,
    float16_dynamic_qconfig,
    float_qparams_weight_only_qconfig,
    float_qparams_weight_only_qconfig_4bit,
)
from torchq_compat.support.user_warnings import warn_user

__all__ = ["ModuleSpec", "qconfigs_by_path", "read_spec"]

#: Type of submodule, or path -> QConfig; None keeps the module float.
ModuleSpec = Mapping[type | str, QConfig | None]

QCONFIGS: Mapping[torch.dtype, QConfig] = {
    torch.qint8: default_dynamic_qconfig,
    torch.float16: float16_dynamic_qconfig,
    torch.quint8: float_qparams_weight_only_qconfig,
    torch.quint4x2: float_qparams_weight_only_qconfig_4bit,
}
LINEAR_AND_RECURRENT = (nn.Linear, nn.LSTM, nn.GRU, nn.LSTMCell, nn.RNNCell, nn.GRUCell)
#: Dtype -> the types it quantizes if no spec is given; torch.ao leaves out nn.RNN.
DEFAULT_TYPES: Mapping[torch.dtype, tuple[type[nn.Module], ...]] = {
    torch.qint8: LINEAR_AND_RECURRENT,
    torch.float16: LINEAR_AND_RECURRENT,
    torch.quint8: (nn.EmbeddingBag, nn.Embedding),
    torch.quint4x2: (nn.EmbeddingBag,),
}


def read_spec(spec: Any, dtype: Any) -> ModuleSpec:
    """Read a set of types and paths, a dict of QConfigs, or None.

    Raises:
        ConfigError: anything else, or a dtype that has no default QConfig.
    """
    if isinstance(spec, Mapping):
        for key, qconfig in spec.items():
            if not isinstance(key, (str, type)) or not isinstance(qconfig, QConfig | None):
                raise ConfigError(
                    f"qconfig_spec: {shown(key)} -> {shown(qconfig)} is no entry.",
                    hint="map types of modules, or their paths, to a QConfig or None.",
                )
        return dict(spec)
    if dtype not in QCONFIGS:
        raise ConfigError(
            f"quantize_dynamic: dtype {dtype} has no default QConfig.",
            hint="give torch.qint8, torch.float16, torch.quint8 or torch.quint4x2, or a dict of QConfigs.",
        )
    if spec is None:
        return dict.fromkeys(DEFAULT_TYPES[dtype], QCONFIGS[dtype])
    if isinstance(spec, (set, frozenset, list, tuple)) and all(
        isinstance(each, (str, type)) for each in spec
    ):
        return dict.fromkeys(spec, QCONFIGS[dtype])
    raise ConfigError(
        f"qconfig_spec must be a set of types and paths or a dict of QConfigs, got {shown(spec)}.",
        hint="write {torch.nn.LSTM, torch.nn.Linear}.",
    )


def qconfigs_by_path(model: nn.Module, spec: ModuleSpec, *, is_given: bool) -> dict[str, QConfig | None]:
    """Return the QConfig of every module as ``torch.ao.quantization.propagate_qconfig_`` does: that of its
    parent, unless its type, its path or its own attribute ``qconfig`` gives another.

    Args:
        is_given: whether a user wrote ``spec``, and is warned about entries that match nothing.
    """
    found = dict(_propagated(model, spec, spec.get("") if "" in spec else None, ""))
    if is_given:
        _warn_of_no_match(model, spec, found)
    return found


def _warn_of_no_match(model: nn.Module, spec: ModuleSpec, paths: Container[str]) -> None:
    """Warn of the paths in ``spec`` that do not exist, and of its classes if no class matches: scripts list
    every class that can be quantized, {nn.LSTM, nn.GRU, nn.Linear}, while models have only some of them."""
    types = {type(module) for module in model.modules()}
    classes = [key for key in spec if not isinstance(key, str)]
    unmatched = [key for key in spec if isinstance(key, str) and key not in paths and key != ""]
    if types.isdisjoint(classes):
        unmatched += [key.__name__ for key in classes]
    if unmatched:
        verb = "matches" if len(unmatched) == 1 else "match"
        warn_user(f"qconfig_spec: {', '.join(unmatched)} {verb} no module of {type(model).__name__}.")


def _propagated(
    module: nn.Module, spec: ModuleSpec, inherited: QConfig | None, path: str
) -> Iterator[tuple[str, QConfig | None]]:
    qconfig = spec.get(type(module), inherited)
    qconfig = spec.get(path, qconfig)
    qconfig = getattr(module, "qconfig", qconfig)
    yield path, qconfig
    for name, child in module.named_children():
        yield from _propagated(child, spec, qconfig, f"{path}.{name}" if path else name)
