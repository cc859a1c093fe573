"""Rewrites in-place ops of a graph as ops that return values."""
