"""Loops over time written in Python: one step is quantized as its own model, and called for each step."""
