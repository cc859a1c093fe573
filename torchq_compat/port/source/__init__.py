"""Source text: files, notebooks, parsed code, and edits that keep every other byte."""
