"""The cell loop under sanitizers, on many builds and thread counts: ``python -m tests.native_harness``."""
