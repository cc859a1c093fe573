"""A free size, given as a constraint."""

import torch
from torch.export import export
from torch.export import Dim
from torchq_compat.pt2e import prepare_pt2e, convert_pt2e
from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
    XNNPACKQuantizer,
    get_symmetric_quantization_config,
)
from torchao.quantization.pt2e import move_exported_model_to_eval

torch.manual_seed(0)
example_inputs = (torch.randn(2, 3, 8, 8),)
model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU()).eval()
constraints = tuple({0: {0: Dim.AUTO}}.get(i) for i in range(len(example_inputs)))
exported_model = export(model, example_inputs, dynamic_shapes=constraints, strict=True).module()
quantizer = XNNPACKQuantizer()
quantizer.set_global(get_symmetric_quantization_config())
prepared_model = prepare_pt2e(exported_model, quantizer)
prepared_model(torch.randn(5, 3, 8, 8))
quantized_model = convert_pt2e(prepared_model)
move_exported_model_to_eval(quantized_model)
print(quantized_model(torch.randn(7, 3, 8, 8)).sum())
