"""Annotate: decides for each node what is quantized, then only writes ``quantization_annotation``."""
