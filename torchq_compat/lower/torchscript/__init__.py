"""TorchScript of captured models: the graph that runs, written as a function that torch.jit compiles.

``torch.jit.script`` asks a module for ``__prepare_scriptable__``; ``torch.jit.trace`` calls it. Both get the
same compiled function, so integer kernels stay and sizes stay free in either.
"""
