"""The last stage: lower the portable q-dq graph to the kernels of a machine.

Legacy: ``torch.ao.quantization.fx._lower_to_native_backend``. Only the entry points import this stage; no
earlier stage does.
"""
