"""Translate QConfigs to QuantizationSpecs, and select QConfigs and object types. Pure functions, no graph."""
