"""Lowered models under torch.compile: integer kernels as calls of one operator, the rest as a plain graph."""
