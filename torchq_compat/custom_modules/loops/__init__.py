"""Loops over time written in Python: one step is quantized as a model of its own, and called for each step."""
