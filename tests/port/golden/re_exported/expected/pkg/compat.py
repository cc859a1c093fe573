"""The one place that knows where FX lives."""
from torchq_compat.quantize_fx import prepare_fx as prep
from torchq_compat import quantize_fx as fx
from torchq_compat.lstm_utils import get_lstm_with_individually_observed_parts as _get_lstm_with_individually_observed_parts
from . import cycle
