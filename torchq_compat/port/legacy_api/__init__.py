"""The legacy API in source code: its names, its calls, its dict forms."""
