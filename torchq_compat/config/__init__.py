"""Read: legacy arguments, as objects or as the deprecated dicts, become frozen values once, on entry."""
