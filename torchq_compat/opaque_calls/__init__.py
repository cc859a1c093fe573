"""A module as one opaque call of the outer graph: flatten, call, quantize and dequantize around it."""
