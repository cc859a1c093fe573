"""The cells: one time step as a float module, as a graph of parts, prepared and converted."""
