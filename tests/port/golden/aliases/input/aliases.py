import torch
import torch.ao.quantization as tq
import torch.ao.quantization.quantize_fx as qfx
from torch.ao.quantization.fx import lstm_utils as parts
from torch.ao.quantization.fx.lstm_utils import (
    _get_lstm_with_individually_observed_parts,
    _get_reference_quantized_lstm_module as to_reference,
)
from torch.ao.quantization.quantize_fx import prepare_fx as prep, PrepareCustomConfig

prepare_qat = tq.quantize_fx.prepare_qat_fx


class Observed(torch.ao.nn.quantizable.LSTM):
    @classmethod
    def from_float(cls, lstm):
        observed = _get_lstm_with_individually_observed_parts(lstm, tanh_obs_ctr=tq.MinMaxObserver)
        return parts._get_lstm_with_individually_observed_parts(lstm) or observed


def everything(m, x):
    p = prep(m, {"": tq.default_qconfig}, (x,), PrepareCustomConfig())
    q = prepare_qat(m, {'object_type': [[torch.nn.Linear, None]]}, (x,))
    return qfx.convert_fx(p), torch.ao.quantization.quantize_fx.convert_to_reference_fx(q), to_reference
