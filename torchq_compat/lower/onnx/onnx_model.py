"""The result of ``to_onnx``: an ONNX model, its opset and its free sizes."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchq_compat.errors import OnnxError, OnnxFileError
from torchq_compat.support.argument_checks import PATH, checked_arguments
from torchq_compat.support.atomic_files import whole_file

__all__ = ["OnnxModel", "check_place", "read_model"]


@dataclass(frozen=True)
class OnnxModel:
    """An ONNX model.

    Attributes:
        proto: the ``onnx.ModelProto``.
        opset: the version of ONNX's standard operators.
        free_sizes: the sizes of inputs that may differ from call to call, as "x in dimension 0".
    """

    proto: Any = field(repr=False)
    opset: int
    free_sizes: tuple[str, ...]

    @checked_arguments(path=PATH)
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model to ``path``, whole or not at all.

        Raises:
            OnnxError: the model exceeds the 2 GiB limit of a file.
            OnnxFileError: the file cannot be written; an existing file is left unchanged.
        """
        content = self.to_bytes()
        try:
            with whole_file(Path(path)) as file:
                file.write(content)
        except OSError as cause:
            raise _not_written(Path(path), cause) from cause

    def to_bytes(self) -> bytes:
        """Return the content of the file, as ``onnxruntime.InferenceSession`` accepts it.

        Raises:
            OnnxError: the model exceeds the 2 GiB limit of a file.
        """
        try:
            content: bytes = self.proto.SerializeToString()
        except Exception as cause:
            raise OnnxError(
                f"the ONNX model cannot be written as one file: {cause}",
                hint="a file has at most 2 GiB; save proto with onnx.save(..., save_as_external_data=True).",
            ) from cause
        return content


def check_place(path: Path) -> None:
    """Refuse a path that no file can have, before the model is translated.

    Raises:
        OnnxFileError: the folder does not exist, or the path is a folder.
    """
    if path.is_dir():
        raise _not_written(path, IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR)))
    if not path.absolute().parent.is_dir():
        raise _not_written(path, FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)))


def _not_written(path: Path, cause: OSError) -> OnnxFileError:
    return OnnxFileError(
        f"the ONNX model cannot be written to {path}: {cause.strerror or cause}.",
        hint="give the path of a file in an existing folder with write permission; an existing file is left "
        "unchanged.",
    )


def read_model(proto: Any, opset: int) -> OnnxModel:
    """Return ``proto`` with the free sizes of its inputs; correct its fixed sizes and its opset imports."""
    for value in (*proto.graph.input, *proto.graph.output):
        for size in value.type.tensor_type.shape.dim:
            if size.dim_param.isdigit():
                # torch.onnx writes a size that turned out to be fixed as a free one named "4".

                size.dim_value = int(size.dim_param)
    free = tuple(
        f"{value.name} in dimension {dimension}"
        for value in proto.graph.input
        for dimension, size in enumerate(value.type.tensor_type.shape.dim)
        if size.HasField("dim_param")
    )
    imported = {each.domain for each in proto.opset_import}
    for domain in sorted({node.domain for node in proto.graph.node} - imported - {""}):
        proto.opset_import.add(domain=domain, version=1)
    return OnnxModel(proto, opset, free)
