"""Every model of this folder is captured once, and prepared with many configurations."""

from tests.helpers.captured_once import captured_once

__all__ = ["captured_once"]
