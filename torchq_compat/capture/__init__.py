"""Capture: torch.export with every dimension dynamic, and where each node came from."""
