"""The cells: one time step as a float module, and as a prepared or converted graph of parts."""
