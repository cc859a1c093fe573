"""nn.MultiheadAttention as a custom module."""
