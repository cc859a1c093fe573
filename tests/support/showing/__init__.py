"""Tests of how reports are shown."""
