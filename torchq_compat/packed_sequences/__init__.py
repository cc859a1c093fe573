"""Packed sequences inside a model, with packing and unpacking as operators of the captured graph."""
