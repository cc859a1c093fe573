"""Custom modules: float, observed and quantized modules, each one opaque call of the outer graph."""
