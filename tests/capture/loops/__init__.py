"""Tests of loops over time written in Python."""
