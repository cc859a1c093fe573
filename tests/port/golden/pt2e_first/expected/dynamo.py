"""As the first tutorials have it: captured by Dynamo, for a quantizer of that time."""

import copy
import torch
import torch._dynamo as torchdynamo
from torchq_compat.pt2e import convert_pt2e, prepare_pt2e
import executorch.backends.xnnpack.quantizer.xnnpack_quantizer as qq

class M(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(5, 10)

    def forward(self, x):
        return self.linear(x)

torch.manual_seed(0)
example_inputs = (torch.randn(1, 5),)
m = M().eval()
m = torch.export.export(m, copy.deepcopy(example_inputs), strict=True).module()
quantizer = qq.XNNPACKQuantizer()
operator_config = qq.get_symmetric_quantization_config(is_per_channel=True)
quantizer.set_global(operator_config)
m = prepare_pt2e(m, quantizer)
m(*example_inputs)
m = convert_pt2e(m)
print(m(*example_inputs))
