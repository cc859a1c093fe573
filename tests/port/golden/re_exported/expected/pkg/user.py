from pkg import fx
from pkg.compat import prep as p, _get_lstm_with_individually_observed_parts
import pkg.cycle
from torch.ao.quantization import QConfigMapping


def make(m, x):
    return fx.convert_fx(p(m, QConfigMapping().set_global(None), (x,)))
