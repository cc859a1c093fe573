"""Fused modules, as ``torch.ao.nn.intrinsic`` has them."""
