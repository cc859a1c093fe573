"""Eager-mode quantization that legacy scripts use beside FX: it maps a model to a model, without a graph."""
