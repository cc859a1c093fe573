"""What no rewrite can know, and names that the installed torchao does not have."""

import torch
import torch._dynamo as torchdynamo
from torch.ao.quantization._quantize_pt2e import convert_pt2e, prepare_pt2e
from torch.ao.quantization.pt2e.utils import get_aten_graph_module
from torch.export import dynamic_dim


def quantize(model, mapping, x, n):
    m, guards = torchdynamo.export(model, x, aten_graph=True, tracing_mode="symbolic")
    e, kept = torchdynamo.export(model, x, aten_graph=True)
    first = torchdynamo.export(model, aten_graph=True)(x)[0]
    program = torch.export.export(model, (x,), constraints=[dynamic_dim(x, n) <= 3])
    return convert_pt2e(prepare_pt2e(m, mapping, (x,))), kept, first, program, get_aten_graph_module
