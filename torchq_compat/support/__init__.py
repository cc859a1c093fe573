"""Used by every stage: decisions, metadata keys, dtypes, warnings at the user's line, files written whole."""
