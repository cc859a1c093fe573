from .compat import *
from .user import make


def again(m, x):
    return prep(m, {"": None}, (x,))
