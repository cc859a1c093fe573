"""Standalone modules: quantized on their own, with their own configuration."""
