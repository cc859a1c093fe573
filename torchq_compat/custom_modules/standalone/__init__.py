"""Standalone modules: quantized on their own, with a configuration of their own."""
