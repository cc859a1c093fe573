"""Mutants of the library: small defects drawn by seed, and which of them the tests notice."""
