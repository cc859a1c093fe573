"""Loops over time written in Python, found in an unrolled capture and rolled into loops of free length."""
