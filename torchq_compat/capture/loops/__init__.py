"""Loops over time written in Python: found in an unrolled capture, and made one loop of free length."""
