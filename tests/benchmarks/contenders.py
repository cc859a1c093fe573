"""The contenders for latency, size and accuracy of a converted model."""

from __future__ import annotations

import copy
import ctypes
import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.benchmarks import peers
from tests.benchmarks.cases import Case
from torchq_compat.recurrent.kernel.build import kernel_build

__all__ = [
    "FEEDFORWARD_CONTENDERS",
    "LOOP_CONTENDERS",
    "RECURRENT_CONTENDERS",
    "Built",
    "Contender",
    "UnavailableError",
]


RECURRENT = {nn.LSTM, nn.GRU, nn.LSTMCell, nn.GRUCell}


class UnavailableError(Exception):
    """Raised if a contender cannot be built; the message is its entry in the table."""


@dataclass(frozen=True)
class Built:
    """A model to call with the inputs of its case, and the size of its saved weights in bytes."""

    run: Callable[..., Any]
    size: int


@dataclass(frozen=True)
class Contender:
    """One way to run a model; ``is_quantized`` says whether its results differ from the float model's."""

    name: str
    build: Callable[[Case], Built]
    is_quantized: bool = True


def _float(case: Case) -> Built:
    return Built(case.model, _saved_size(case.model))


def _dynamic(case: Case) -> Built:
    quantized = torch.ao.quantization.quantize_dynamic(copy.deepcopy(case.model), RECURRENT, torch.qint8)
    return Built(quantized, _saved_size(quantized))


def _fx(case: Case) -> Built:
    quantized = case.lowered_by_fx()
    return Built(quantized, _saved_size(quantized))


def _reference(case: Case) -> Built:
    return Built(case.reference, _saved_size(case.reference))


def _lowered(case: Case) -> Built:
    if not hasattr(case.lowered, "reference"):
        raise UnavailableError("convert_fx gives the reference graph on this machine")
    return Built(case.lowered, _saved_size(case.lowered))


def _lowered_on(instruction_set: str, case: Case) -> Built:
    """Build the lowered model on an older instruction set that this CPU also has; cells keep the one they
    were packed for."""
    if kernel_build().library is None:
        raise UnavailableError("the native kernel could not be built")
    library = ctypes.CDLL(str(kernel_build().library))
    with torch.inference_mode():
        case.lowered(*case.inputs)  # A later first call would move shared weights.
    if library.torchq_compat_use_instruction_set(instruction_set.encode()):
        raise UnavailableError("this CPU does not have it")
    try:
        lowered = copy.deepcopy(case.lowered)
        with torch.inference_mode():
            lowered(*case.inputs)
    finally:
        library.torchq_compat_use_instruction_set(None)
    return Built(lowered, _saved_size(lowered))


def _compiled(case: Case) -> Built:
    # Graphs compiled for another case would count against dynamo's recompilation limit.
    torch._dynamo.reset()
    return Built(torch.compile(copy.deepcopy(case.lowered)), _saved_size(case.lowered))


def _peer(build: Callable[[Case], tuple[Callable[..., Any], int]], case: Case) -> Built:
    try:
        return Built(*build(case))
    except ImportError as cause:
        raise UnavailableError(f"{cause}; the extra 'bench' has it") from cause


def _executorch(backend: str, case: Case) -> Built:
    try:
        from torchq_compat.lower.executorch.lowering import to_executorch
    except ImportError as cause:
        raise UnavailableError(str(cause)) from cause
    program = to_executorch(case.reference, case.inputs, backend=backend)
    return Built(program, len(program.pte))


def _onnx_runtime(case: Case) -> Built:
    try:
        import onnxruntime

        from torchq_compat.lower.onnx.lowering import to_onnx
    except ImportError as cause:
        raise UnavailableError(str(cause)) from cause
    content = to_onnx(case.reference, case.inputs).to_bytes()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = torch.get_num_threads(), 3
    session = onnxruntime.InferenceSession(content, options)
    names = [each.name for each in session.get_inputs()]

    def run(*inputs: Any) -> list[torch.Tensor]:
        flat = torch.utils._pytree.tree_leaves(inputs)
        found = session.run(None, {name: x.numpy() for name, x in zip(names, flat, strict=True)})
        return [torch.from_numpy(each) for each in found]

    return Built(run, len(content))


def _saved_size(model: nn.Module) -> int:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    return file.tell()


FLOAT = Contender("float", _float, is_quantized=False)
DYNAMIC = Contender("dynamic quantized", _dynamic)
FX = Contender("FX static", _fx)
OURS = (
    Contender("ours, reference", _reference),
    Contender("ours, lowered", _lowered),
    Contender("ours, compiled", _compiled),
)
ON_OLDER_CPUS = (
    Contender("ours, lowered on AVX-VNNI", partial(_lowered_on, "avx_vnni")),
    Contender("ours, lowered on AVX2", partial(_lowered_on, "avx2")),
)
IN_ONNX = Contender("ours, ONNX Runtime", _onnx_runtime)
ON_DEVICE = (
    Contender("ours, ExecuTorch portable", partial(_executorch, "portable")),
    Contender("ours, ExecuTorch XNNPACK", partial(_executorch, "xnnpack")),
    IN_ONNX,
)
PEERS = (
    Contender("bfloat16", partial(_peer, peers.bfloat16)),
    Contender("ONNX Runtime, float", partial(_peer, peers.onnxruntime_float), is_quantized=False),
    Contender("ONNX Runtime, dynamic int8", partial(_peer, peers.onnxruntime_dynamic)),
    Contender("OpenVINO, float", partial(_peer, peers.openvino_float), is_quantized=False),
    Contender("OpenVINO, int8", partial(_peer, peers.openvino_int8)),
)
RECURRENT_CONTENDERS = (FLOAT, DYNAMIC, FX, *PEERS, *OURS, *ON_OLDER_CPUS, *ON_DEVICE)
#: FX has no static cells; the exporters of the other engines would unroll what is a loop here.
LOOP_CONTENDERS = (FLOAT, DYNAMIC, PEERS[0], *OURS)
FEEDFORWARD_CONTENDERS = (FLOAT, FX, *OURS, IN_ONNX)
