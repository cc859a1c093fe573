import torch
import torch.ao.quantization as tq
import torchq_compat.quantize_fx as qfx
from torchq_compat import lstm_utils as parts
from torchq_compat.lstm_utils import (
    get_lstm_with_individually_observed_parts,
    get_reference_quantized_lstm_module as to_reference,
)
from torchq_compat.quantize_fx import prepare_fx as prep
from torchq_compat.custom_config import PrepareCustomConfig
from torch.ao.quantization import QConfigMapping
import torchq_compat.quantize_fx

prepare_qat = torchq_compat.quantize_fx.prepare_qat_fx


class Observed(torch.ao.nn.quantizable.LSTM):
    @classmethod
    def from_float(cls, lstm):
        observed = get_lstm_with_individually_observed_parts(lstm, tanh_obs_ctr=tq.MinMaxObserver)
        return parts.get_lstm_with_individually_observed_parts(lstm) or observed


def everything(m, x):
    p = prep(m, QConfigMapping().set_global(tq.default_qconfig), (x,), PrepareCustomConfig())
    q = prepare_qat(m, QConfigMapping().set_object_type(torch.nn.Linear, None), (x,))
    return qfx.convert_fx(p), torchq_compat.quantize_fx.convert_to_reference_fx(q, observer_qparams=True), to_reference
