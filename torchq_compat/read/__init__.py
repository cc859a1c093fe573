"""Read legacy arguments, objects or the deprecated dicts, into frozen values, once, on entry."""
