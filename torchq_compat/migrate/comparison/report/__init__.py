"""Show the measurements: as tables, as JSON and as one HTML page."""
