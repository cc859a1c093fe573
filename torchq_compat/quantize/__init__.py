"""Prepare and convert, composed of the stages, and ``explain``, which reports their decisions."""
