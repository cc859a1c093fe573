"""Lowering to the int8 kernels of torch on x86."""
