"""Every model of this folder is captured once, and prepared for many engines."""

from tests.helpers.captured_once import captured_once

__all__ = ["captured_once"]
