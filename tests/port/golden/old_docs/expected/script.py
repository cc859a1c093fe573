"""As old docstrings have it: functions imported from one package too high, and getters of dicts."""

import torch
from torch.ao.quantization import convert_fx, get_default_qat_qconfig_mapping, prepare_fx
from torch.ao.quantization.quantize_fx import prepare_qat_fx
from torch.ao.quantization import get_default_qconfig_mapping
from torch.ao.quantization import get_default_qat_qconfig_dict as qat_dict


def quantize(model, x):
    prepared = prepare_fx(model.eval(), get_default_qat_qconfig_mapping("fbgemm"), (x,))
    prepared(x)
    trained = prepare_qat_fx(model.train(), get_default_qconfig_mapping("fbgemm"), (x,))
    changed = qat_dict("fbgemm")
    changed["object_type"] = []
    return convert_fx(prepared), trained, prepare_qat_fx(model, changed, (x,))
