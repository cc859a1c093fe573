"""The legacy API as source code uses it: its names, its calls, its dict forms."""
