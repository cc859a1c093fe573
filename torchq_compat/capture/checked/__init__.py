"""Capture that is checked: what is handed out has been run beside the float model."""
