"""Packed sequences inside a model: packing and unpacking as operators of the captured graph."""
