"""Save and load checkpoints, and load states that FX saved.

An interrupted save leaves the old file in place, and a damaged file is refused.
"""

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import nn

from torchq_compat.custom_modules import handler_of
from torchq_compat.eager.users_model import ConvertedEager, EagerModel
from torchq_compat.errors import ArgumentError, CheckpointError
from torchq_compat.fx_state.load import load_module_state, load_state
from torchq_compat.fx_state.states import packed_names
from torchq_compat.model.graph_module import QuantizationGraphModule, Stage
from torchq_compat.model.state import load_whole
from torchq_compat.support import argument_checks
from torchq_compat.support.atomic_files import whole_file

__all__ = ["load_checkpoint", "load_fx_state", "save_checkpoint"]


MODULE = argument_checks.instance_of(nn.Module, what="an nn.Module")
BY_NAME = argument_checks.mapping_of(argument_checks.instance_of(str), argument_checks.ANYTHING)
STATE = argument_checks.Expected(
    f"{MODULE.what}, or {BY_NAME.what}",
    lambda value: bool(MODULE.accepts(value) or (BY_NAME.accepts(value) and value)),
    MODULE.classes,
)


@argument_checks.checked_arguments(state=STATE, path=argument_checks.PATH)
def save_checkpoint(state: nn.Module | Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write ``state`` to ``path`` in one step.

    The file is written beside ``path`` and moved over it once it is complete and on disk.

    Args:
        state: a module, its state_dict, or a mapping from names to state_dicts and plain values.
        path: the file; an existing one is replaced.

    Raises:
        CheckpointError: ``state`` has a value that cannot be saved.
        OSError: the file cannot be written; an existing one is left as it was.
    """
    content = state.state_dict() if isinstance(state, nn.Module) else dict(state)
    name = Path(path).name
    with whole_file(Path(path)) as file:
        try:
            torch.save(content, file)
        except OSError:
            raise
        except Exception as cause:
            fault = _fault_of_disk(cause)
            raise fault or CheckpointError.of("TQ960.not_written", path=name, cause=cause) from cause
        if foreign := _foreign_classes(file):
            names = ", ".join(foreign)
            raise CheckpointError.of("TQ960.cannot_be_read_again", path=name, names=names)


@argument_checks.checked_arguments(path=argument_checks.PATH, model=argument_checks.optional(MODULE))
def load_checkpoint(path: str | os.PathLike[str], model: nn.Module | None = None) -> dict[str, Any]:
    """Read a file that ``save_checkpoint`` wrote, and load it into ``model`` if given.

    Only tensors and plain values are read.

    Args:
        path: the file. A tensor that was on an accelerator is read to the CPU where there is none.
        model: the model to load the state into, with ``strict=True``; None to read only.

    Returns:
        The saved state.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: the file is not a complete checkpoint, or does not fit ``model``, which is unchanged.
    """
    # Without an accelerator torch reads no tensor that was on one.
    device = None if torch.accelerator.is_available() else "cpu"
    try:
        content: dict[str, Any] = torch.load(path, weights_only=True, map_location=device)
    except FileNotFoundError:
        raise
    except Exception as cause:
        name = Path(path).name
        if packed := packed_names(path):
            names = argument_checks.listed(packed)
            raise CheckpointError.of("TQ960.packed_objects", path=name, shown_names=names) from cause
        raise CheckpointError.of("TQ960.unreadable", path=name, cause=cause) from cause
    if not BY_NAME.accepts(content):
        raise CheckpointError.of("TQ960.not_a_state", result=argument_checks.shown(content))
    if model is not None:
        checks_itself = isinstance(model, (QuantizationGraphModule, EagerModel))
        model.load_state_dict(content) if checks_itself else load_whole(model, content, model.load_state_dict)
    return content


@argument_checks.checked_arguments(prepared=MODULE, state_dict=BY_NAME)
def load_fx_state(prepared: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Load the ``state_dict()`` of a model of FX into a model prepared by this package.

    FX's model may be a prepared one, calibrated or trained; a converted one, for a backend or as a reference;
    or one from ``torch.ao.quantization.quantize_dynamic``; or a model of eager mode, for a model that
    ``quantize_eager.prepare`` or ``prepare_qat`` returned. The values of a prepared model are loaded
    unchanged, so calibration and training continue where they were. From a converted model, the dequantized
    integers are loaded as weights, and all qparams stay as saved until the observers see data again; batch
    norms that training kept separate become identities.

    Args:
        prepared: the model that ``prepare_fx``, ``prepare_qat_fx`` or their counterparts in
            ``quantize_eager`` returned for the same float model and configuration; changed in place.
        state_dict: the state, with the names and values FX gave it. The packed objects of functions and of
            dynamic modules are read if torch.load was allowed to load them. The state of a converted model
            with embeddings is only valid while that model exists, since torch leaves the scales in the
            packed weight: load the state, or save it to a file, before the model is deleted.

    Raises:
        CheckpointError: the state is incomplete or of another model, or has entries that have no place here,
            NaN, or values that cannot be read; the message names them, and ``prepared`` is unchanged.
        ArgumentError: ``prepared`` was not prepared by this package.

    Example:
        >>> import torch
        >>> from torch.ao.quantization import get_default_qconfig_mapping, quantize_fx
        >>> from torchq_compat import convert_fx, prepare_fx
        >>> from torchq_compat.checkpoints import load_fx_state
        >>> model, x = torch.nn.Sequential(torch.nn.Linear(4, 2)).eval(), torch.randn(3, 4)
        >>> calibrated = quantize_fx.prepare_fx(model, get_default_qconfig_mapping("x86"), (x,))
        >>> _ = calibrated(torch.randn(50, 4))
        >>> prepared = prepare_fx(model, get_default_qconfig_mapping("x86"), (x,))
        >>> load_fx_state(prepared, calibrated.state_dict())
        >>> convert_fx(prepared)(x).shape
        torch.Size([3, 2])
    """
    if isinstance(prepared, EagerModel) and not isinstance(prepared, ConvertedEager):
        load_module_state(prepared, state_dict, handler_of)
        return
    if not isinstance(prepared, QuantizationGraphModule) or prepared.record.stage is not Stage.PREPARED:
        result = prepared.record.stage.value if isinstance(prepared, QuantizationGraphModule) else "float"
        raise ArgumentError.of("TQ903.not_prepared_here", prepared=prepared, result=result)
    load_state(prepared, state_dict, handler_of)


def _foreign_classes(file: BinaryIO) -> list[str]:
    """Return the classes in the checkpoint just written that ``load_checkpoint`` would refuse to make."""
    file.flush()
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return []  # A device cannot be read again.
    names: list[str] = torch.serialization.get_unsafe_globals_in_checkpoint(file.name)
    return names


def _fault_of_disk(cause: BaseException | None) -> OSError | None:
    """Return the error of the operating system behind ``cause``: torch's writer raises a RuntimeError after
    it."""
    while cause is not None:
        if isinstance(cause, OSError):
            return cause
        cause = cause.__cause__ or cause.__context__
    return None
