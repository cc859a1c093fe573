"""Read: legacy arguments, as objects or as the deprecated dicts, become frozen values once, at the door."""
