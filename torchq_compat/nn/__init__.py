"""Quantizable, quantized and intrinsic modules, under the names of ``torch.ao.nn``."""
