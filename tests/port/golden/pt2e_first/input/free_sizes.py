"""A free size, given as a constraint."""

import torch
from torch._export import capture_pre_autograd_graph, dynamic_dim
from torch.ao.quantization.quantize_pt2e import prepare_pt2e, convert_pt2e
from torch.ao.quantization.quantizer.xnnpack_quantizer import (
    XNNPACKQuantizer,
    get_symmetric_quantization_config,
)
from torch.ao.quantization import move_exported_model_to_eval

torch.manual_seed(0)
example_inputs = (torch.randn(2, 3, 8, 8),)
model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU()).eval()
constraints = [
    dynamic_dim(example_inputs[0], 0),
]
exported_model = capture_pre_autograd_graph(model, example_inputs, constraints=constraints)
quantizer = XNNPACKQuantizer()
quantizer.set_global(get_symmetric_quantization_config())
prepared_model = prepare_pt2e(exported_model, quantizer)
prepared_model(torch.randn(5, 3, 8, 8))
quantized_model = convert_pt2e(prepared_model)
move_exported_model_to_eval(quantized_model)
print(quantized_model(torch.randn(7, 3, 8, 8)).sum())
