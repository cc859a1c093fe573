"""Annotate: decide for each node what is quantized, then write ``quantization_annotation``; nothing else."""
