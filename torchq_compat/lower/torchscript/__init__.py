"""TorchScript of captured models: the graph that runs, written as a function that torch.jit compiles.

``torch.jit.script`` calls ``__prepare_scriptable__`` of a module; ``torch.jit.trace`` calls the module. Both
get the same compiled function, so both keep integer kernels and free sizes.
"""
