"""Captured models: their graph modules, observers, qparams, and integer inputs and outputs."""
