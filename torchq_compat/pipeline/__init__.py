"""Prepare and convert, from the stages; and what they decided, explained."""
