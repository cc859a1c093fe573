"""Functions for fused modules, under the names of ``torch.ao.nn.intrinsic``."""
