"""What scripts read inside converted models: found, and left for a person."""

import re

import torch
from torch import nn
from torchq_compat.quantize_fx import convert_fx, prepare_fx

prepared = prepare_fx(model, mapping, (x,))
quantized = convert_fx(prepared)
print(quantized.conv1.weight())
first, scale = getattr(quantized, "conv1"), quantized.state_dict()["conv1.scale"]
for name, module in quantized.named_modules():
    print(name, module.scale)
for node in quantized.graph.nodes:
    print(node.op)
for key, value in state.items():
    print(re.match(r"features_(\d+)_scale_0", key), key == "features_0_input_zero_point_0")
if not any(type(m).__module__.startswith(("torch.ao.nn.quantized", "torch.nn.quantized")) for m in modules):
    raise ValueError("nothing was quantized")
for node in prepared.graph.nodes:
    if node.op == "call_module" and node.target == "conv1":
        setattr(prepared, "activation_post_process_1", torch.ao.quantization.MinMaxObserver())
prepared.activation_post_process_0.min_val = torch.zeros(1)

quantized.fc = nn.Identity()

# None of these reads inside.
quantized.names = model.names
print(quantized.names, quantized.classes, PrepareCustomConfig().set_preserved_attributes(["classes"]))
print(prepared.graph, model.graph.nodes, "activation_post_process", prepared.conv1.weight)
quantized.eval()
quantized.load_state_dict(torch.load("q.pth"))
torch.save(quantized.state_dict(), "q.pth")
print(quantized, quantized.graph, quantized.code)
for name, module in prepared.named_modules():
    print(name, isinstance(module, (nn.Linear, torch.ao.nn.quantized.Linear)))
print("one_scale_0 in a text", "log_scale_factor", "scale_0", "torch.ao.nn.quantizable")
quantized = model
print(quantized.conv1.weight)
