"""What a page says of where it was made: versions, date, processor, command."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

__all__ = ["made_by"]

PACKAGES = ("torchq-compat", "torch", "torchao")


def made_by() -> dict[str, str]:
    """Return label -> text."""
    return {
        "versions": ", ".join(
            filter(None, (*map(_version, PACKAGES), f"Python {platform.python_version()}"))
        ),
        "date": datetime.date.today().isoformat(),
        "processor": f"{_processor()}, {os.cpu_count()} cores",
        "command": _command(),
    }


def _version(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return ""


def _processor() -> str:
    """Linux names the model in a file; elsewhere the platform has a word."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def _command() -> str:
    name = Path(sys.argv[0]).name
    if name in ("torchq-compat", "__main__.py") and len(sys.argv) > 1:
        return shlex.join(["torchq-compat", *sys.argv[1:]])
    return "torchq_compat.compare(...)"
