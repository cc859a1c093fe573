"""The version and home page of the project, from the package's metadata."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, metadata, version

__all__ = ["package_version", "project_address"]


def project_address() -> str | None:
    """Return the project's home page; None if the package runs from a source tree without metadata."""
    try:
        urls = metadata("torchq-compat").get_all("Project-URL") or []
    except PackageNotFoundError:
        return None
    return dict(url.split(", ", 1) for url in urls).get("Homepage")


def package_version() -> str:
    """Return the version; ``unknown`` if the package runs from a source tree without metadata."""
    try:
        return version("torchq-compat")
    except PackageNotFoundError:
        return "unknown"
