from .compat import prep, fx
