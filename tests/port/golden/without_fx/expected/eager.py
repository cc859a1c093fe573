import torch
import torch.quantization
from torch.quantization import default_qconfig
from torchq_compat import quantize_dynamic
from mine import prepare_fx, qconfig_dict


def prepare_qat_fx(model, qconfig_dict):
    """Not the one of torch: torch.ao.quantization.quantize_fx.prepare_qat_fx."""
    return model


prepare_fx(1, {"": default_qconfig}, {"preserved_attributes": []})
prepare_qat_fx(1, qconfig_dict={"": default_qconfig})
model = torch.jit.script(quantize_dynamic(torch.nn.Linear(2, 2)))
torch.jit.save(model, "m.pt")
