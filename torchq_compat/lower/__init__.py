"""The last stage: from the portable q-dq graph to kernels of a machine.

Legacy: ``torch.ao.quantization.fx._lower_to_native_backend``. Nothing before this stage imports it; only the
entry points do.
"""
