"""The few models of this folder are prepared with many configurations: each is captured once."""

from tests.helpers.captured_once import captured_once

__all__ = ["captured_once"]
