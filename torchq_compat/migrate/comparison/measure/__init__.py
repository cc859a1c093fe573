"""Measure the float model, this package and FX on the same batches."""
