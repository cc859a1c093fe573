"""One thing for every code that looks like what it finds, and is not: nothing to do."""

import torch
import torch.ao.quantization
import torch.onnx
from mine import configs, engine, legacy, ns, quantize_fx
from mine.numeric_suite import compare_weights
from torch.ao.quantization import QConfigMapping, default_qconfig, get_default_qconfig_mapping
from torchao.quantization.pt2e import MinMaxObserver
from torchq_compat.pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer import QuantizationSpec
from torchq_compat import quantize_dynamic
from torchq_compat.custom_config import PrepareCustomConfig
from torchq_compat.lstm_utils import get_lstm_with_individually_observed_parts
from torchq_compat.quantize_fx import convert_fx, convert_to_reference_fx, prepare_fx


def look_alikes(model, x, y, batches):
    quantize_fx.prepare_fx(model)  # TQ101: a module of one's own with that name
    legacy._get_lstm_with_individually_observed_parts(model)  # TQ102
    config = PrepareCustomConfig()  # TQ103
    mapping = torch.ao.quantization.get_default_qconfig_mapping("x86")  # TQ104
    prepared = prepare_fx(model, QConfigMapping().set_global(default_qconfig), (x,), config)  # TQ105, TQ106
    other = {"": default_qconfig, "object_type": []}  # TQ105: a dict that no prepare takes
    configs.prepare(model, qconfig_dict=other, prepare_custom_config_dict={})  # TQ107: another's keyword
    converted = convert_to_reference_fx(prepared)
    engine.convert_fx(prepared, is_reference=True)  # TQ108: another's function
    legacy.get_default_qconfig_dict("fbgemm")  # TQ109
    quantize_dynamic(model, {torch.nn.Linear})  # TQ111
    spec = QuantizationSpec(torch.int8, MinMaxObserver)  # TQ112, TQ115
    prepare_fx(model, mapping, (x, y))  # TQ113
    program = torch.export.export(model, (x,))  # TQ114
    prepare_fx(model, get_default_qconfig_mapping("x86"), tuple(batches[0]))  # TQ201: made elsewhere
    prepare_fx(model, mapping, (x, 3, [y, None]))  # TQ201: numbers beside tensors
    prepare_fx(model, mapping, (next(iter(batches))[0],))  # TQ201: without the targets
    for shape in ((1, 3), x.shape):
        prepare_fx(model, mapping, shape)  # TQ201: not known
    prepare_fx(model, mapping, (x,), _equalization_config=None)  # TQ202
    graph_module = torch.fx.GraphModule(model, torch.fx.Graph())  # TQ203: fx, and not quantization's
    print("quantize_fx is what this was")  # TQ204: prose
    torch.save({"model": converted.state_dict(), "float": model}, "a.pt")  # TQ205
    compare_weights(model, converted), ns.compare(model)  # TQ206: one's own numeric suite
    torch.onnx.export(converted, (x,), "a.onnx", dynamo=True)  # TQ207
    torch.onnx.export(model, (x,), "float.onnx")  # TQ207
    for name, value in converted.state_dict().items():  # TQ208
        print(name, value.shape, model.conv1.weight, converted.training)
    engine.prepare(model), ns.convert(prepared), torch.nn.Sequential.fuse_modules(model)  # TQ117: another's
    torch.ops.aten.add(x, y), ns.quantized.Conv2d(3, 3, 1)  # TQ209: not torch.ao's
    mine.fake_quantize(converted), engine.convert_fx(prepared)  # TQ116: one's own, and ported calls
    mine.torchdynamo.export(model, x, aten_graph=True), engine.dynamic_dim(x, 0)  # TQ121, TQ122: one's own
    # TQ120: ours already
    return convert_fx(prepared), program, graph_module, spec, convert_pt2e(prepare_pt2e(program.module(), spec))
