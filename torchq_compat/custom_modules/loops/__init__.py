"""Loops over time written in Python: a step is quantized as a model of its own, and called for each step."""
