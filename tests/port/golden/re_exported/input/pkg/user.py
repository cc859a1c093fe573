from pkg import fx
from pkg.compat import prep as p, _get_lstm_with_individually_observed_parts
import pkg.cycle


def make(m, x):
    return fx.convert_fx(p(m, {"": None}, (x,)))
