"""Other engines on the recurrent cases: ONNX Runtime, OpenVINO and torch in bfloat16."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.benchmarks.cases import Case, RecurrentModel

__all__ = ["bfloat16", "onnxruntime_dynamic", "onnxruntime_float", "openvino_float", "openvino_int8"]

Built = tuple[Callable[..., Any], int]
#: The position of each of torch's gates in ONNX's weights.
GATES = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2)}


def bfloat16(case: Case) -> Built:
    """Build torch's own kernels in bfloat16, with inputs and results cast."""
    model = copy.deepcopy(case.model).bfloat16()

    def run(*inputs: Tensor) -> Any:
        result = model(*(each.bfloat16() for each in inputs))
        return result.float()

    return run, sum(parameter.numel() * 2 for parameter in model.parameters())


def onnxruntime_float(case: Case) -> Built:
    return _in_onnxruntime(onnx_model(case), case.threads)


def onnxruntime_dynamic(case: Case) -> Built:
    """Build ``DynamicQuantizeLSTM``: int8 weights, activations quantized at run time."""
    return _in_onnxruntime(_quantized_by_onnxruntime(onnx_model(case)), case.threads)


def openvino_float(case: Case) -> Built:
    return _in_openvino(onnx_model(case).SerializeToString(), case)


def openvino_int8(case: Case) -> Built:
    """Build the OpenVINO model after NNCF's post-training quantization; mind its SQNR."""
    import nncf
    import openvino

    model = openvino.Core().read_model(onnx_model(case).SerializeToString())
    batches = [[each.numpy() for each in batch] for batch in case.batches]
    return _in_openvino(nncf.quantize(model, nncf.Dataset(batches)), case)


def onnx_model(case: Case) -> Any:
    """Return the module of ``case`` in ONNX's own operators: from x, h (and c) to the output."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    model = case.model
    assert isinstance(model, RecurrentModel)
    rnn = model.lstm
    assert isinstance(rnn, nn.RNNBase)
    kind, directions = type(rnn).__name__, 1 + rnn.bidirectional
    nodes, constants = [], []

    def constant(name: str, value: Tensor) -> str:
        constants.append(numpy_helper.from_array(value.detach().numpy(), name))
        return name

    def state(name: str, layer: int) -> str:
        first, last = layer * directions, (layer + 1) * directions
        bounds = [constant(f"{name}{layer}_{at}", torch.tensor([at])) for at in (first, last)]
        axes = constant(f"{name}{layer}_axes", torch.tensor([0]))
        nodes.append(helper.make_node("Slice", [name, *bounds, axes], [f"{name}{layer}"]))
        return f"{name}{layer}"

    x = "x"
    for layer in range(rnn.num_layers):
        suffixes = [f"_l{layer}", f"_l{layer}_reverse"][:directions]
        stacked = {
            part: torch.stack([_gates(kind, getattr(rnn, f"{part}{suffix}")) for suffix in suffixes])
            for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        }
        bias = torch.cat([stacked["bias_ih"], stacked["bias_hh"]], 1)
        inputs = [x, constant(f"W{layer}", stacked["weight_ih"]), constant(f"R{layer}", stacked["weight_hh"])]
        inputs += [constant(f"B{layer}", bias), "", state("h", layer)]
        more: dict[str, Any] = {"linear_before_reset": 1}
        if kind == "LSTM":
            inputs, more = [*inputs, state("c", layer)], {}
        direction = "bidirectional" if directions == 2 else "forward"
        nodes.append(
            helper.make_node(
                kind, inputs, [f"Y{layer}"], hidden_size=rnn.hidden_size, direction=direction, **more
            )
        )
        # (T, D, B, H) -> (T, B, D * H)
        nodes.append(helper.make_node("Transpose", [f"Y{layer}"], [f"turned{layer}"], perm=[0, 2, 1, 3]))
        shape = constant(f"shape{layer}", torch.tensor([0, 0, -1]))
        nodes.append(helper.make_node("Reshape", [f"turned{layer}", shape], [f"out{layer}"]))
        x = f"out{layer}"
    names = ("x", "h", "c")[: len(case.inputs)]
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, list(value.shape))
        for name, value in zip(names, case.inputs, strict=True)
    ]
    result = helper.make_tensor_value_info(x, TensorProto.FLOAT, ["steps", "batch", "width"])
    graph = helper.make_graph(nodes, "recurrent", values, [result], constants)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(made)
    return made


def _gates(kind: str, value: Tensor) -> Tensor:
    pieces = value.chunk(len(GATES[kind]))
    return torch.cat([pieces[index] for index in GATES[kind]])


def _quantized_by_onnxruntime(model: Any) -> Any:
    import tempfile
    from pathlib import Path

    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with tempfile.TemporaryDirectory() as directory:
        before, after = Path(directory) / "float.onnx", Path(directory) / "int8.onnx"
        onnx.save(model, before)
        quantize_dynamic(before, after, weight_type=QuantType.QInt8, per_channel=True)
        quantized = onnx.load(after)
    if not any(node.op_type.startswith("DynamicQuantize") for node in quantized.graph.node):
        raise RuntimeError("ONNX Runtime has no int8 kernel for this module")
    return quantized


def _in_onnxruntime(model: Any, threads: int) -> Built:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    content = model.SerializeToString()
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]

    def run(*inputs: Tensor) -> Tensor:
        given = {name: value.numpy() for name, value in zip(names, inputs, strict=True)}
        return torch.from_numpy(session.run(None, given)[0])

    return run, len(content)


def _in_openvino(model: Any, case: Case) -> Built:
    import openvino

    core = openvino.Core()
    read = core.read_model(model) if isinstance(model, bytes) else model
    # Without the hint OpenVINO computes in bfloat16 where the CPU can.
    settings = {"INFERENCE_NUM_THREADS": case.threads, "INFERENCE_PRECISION_HINT": "f32"}
    request = core.compile_model(read, "CPU", settings).create_infer_request()

    def run(*inputs: Tensor) -> Tensor:
        request.infer([each.numpy() for each in inputs])
        return torch.from_numpy(request.get_output_tensor(0).data.copy())

    constants = (node for node in read.get_ops() if node.get_type_name() == "Constant")
    return run, sum(node.get_byte_size() for node in constants)
