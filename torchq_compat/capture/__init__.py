"""Capture: torch.export with every dimension dynamic, and the origin of each node."""
