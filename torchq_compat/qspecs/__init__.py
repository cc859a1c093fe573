"""Translate: QConfig -> QuantizationSpec, selectors, object types. Pure functions, no graph."""
