"""Rewriting a text that is rewritten already, and scanning what was rewritten, parse it once."""

from __future__ import annotations

from tests.helpers.parsed_once import parsed_once

__all__ = ["parsed_once"]
