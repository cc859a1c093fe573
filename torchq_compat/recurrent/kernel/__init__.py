"""A converted cell over time as one call of a native kernel on integers."""
