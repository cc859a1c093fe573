"""Writes in place, as values."""
