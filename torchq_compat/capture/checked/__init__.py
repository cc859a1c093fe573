"""Checked capture: every captured graph has been run beside the float model."""
