"""Config dicts that more than one name holds: found, and left; a dict of one name is rewritten."""

from torch.ao.quantization import default_qconfig, float16_dynamic_qconfig, QConfigMapping
from torchq_compat.quantize_fx import convert_fx, prepare_fx

first = second = {"": default_qconfig}
third, fourth = {"": default_qconfig}, {"": float16_dynamic_qconfig}
fifth = fourth
if big:
    sixth = {"": default_qconfig}
else:
    sixth = {"": float16_dynamic_qconfig}
seventh = QConfigMapping().set_global(default_qconfig)
for config in (first, second):
    convert_fx(prepare_fx(model, config, (x,)))
prepare_fx(model, first, (x,))
prepare_fx(model, second, (x,))
prepare_fx(model, third, (x,))
prepare_fx(model, fifth, (x,))
prepare_fx(model, sixth, (x,))
prepare_fx(model, seventh, (x,))
a, b = b, a
prepare_fx(model, a, (x,))
