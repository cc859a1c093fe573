"""The quantizer of Inductor by its old paths, and a function of torch.ao.quantization itself."""

import torch
import torchao.quantization.pt2e.quantizer.x86_inductor_quantizer as xiq
from torchq_compat.pt2e import prepare_qat_pt2e, convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import X86InductorQuantizer
from torch.export import export
import torch.ao.quantization
import torchao.quantization.pt2e
torch.manual_seed(0)
x = (torch.randn(2, 3, 8, 8),)
model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU()).eval()
with torch.no_grad():
    e = export(model, x, strict=True).module()
q = X86InductorQuantizer()
q.set_global(xiq.get_default_x86_inductor_quantization_config())
p = prepare_pt2e(e, q)
p(*x)
c = convert_pt2e(p)
torchao.quantization.pt2e.move_exported_model_to_eval(c)
print(c(*x).sum())
