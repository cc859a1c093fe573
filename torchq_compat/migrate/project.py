"""Where this project lives, as its package metadata say; the address stands in pyproject.toml alone."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, metadata

__all__ = ["project_address"]


def project_address() -> str | None:
    """Return the project's home page; None where the package runs from a source tree without metadata."""
    try:
        urls = metadata("torchq-compat").get_all("Project-URL") or []
    except PackageNotFoundError:
        return None
    return dict(url.split(", ", 1) for url in urls).get("Homepage")
