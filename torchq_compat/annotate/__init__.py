"""Annotate: decides for each node what is quantized, then writes ``quantization_annotation``; nothing
else."""
