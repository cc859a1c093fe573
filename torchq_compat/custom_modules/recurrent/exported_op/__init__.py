"""Converted recurrent modules as one operator of an exported program."""
