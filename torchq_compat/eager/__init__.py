"""Eager-mode quantization that legacy scripts call beside FX: models in, models out, no graph."""
