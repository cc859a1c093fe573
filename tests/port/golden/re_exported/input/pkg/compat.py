"""The one place that knows where FX lives."""
from torch.ao.quantization.quantize_fx import prepare_fx as prep
from torch.ao.quantization import quantize_fx as fx
from torch.ao.quantization.fx.lstm_utils import _get_lstm_with_individually_observed_parts
from . import cycle
