from .compat import *
from .user import make
from torch.ao.quantization import QConfigMapping


def again(m, x):
    return prep(m, QConfigMapping().set_global(None), (x,))
