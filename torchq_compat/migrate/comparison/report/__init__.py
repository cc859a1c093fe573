"""Report: what was measured, as tables, as JSON and as one HTML page."""
