"""The rows of a report, as text for a terminal and as HTML for a notebook."""
