"""What is kept of a captured model: its graph module, observers, qparams and integer inputs and outputs."""
