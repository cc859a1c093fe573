"""How reports are shown."""
