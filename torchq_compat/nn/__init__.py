"""Quantizable and quantized modules, as ``torch.ao.nn`` has them."""
