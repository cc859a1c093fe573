"""The guide and the API reference as one site, in build/site: python .ci/site.py (extra ``docs``)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
SITE = CHECKOUT / "build" / "site"


def main() -> None:
    """Build the guide, then the API reference into its folder ``api``."""
    config = str(CHECKOUT / ".ci" / "mkdocs.yml")
    subprocess.run([sys.executable, "-m", "mkdocs", "build", "--quiet", "--config-file", config], check=True)
    reference = str(CHECKOUT / ".ci" / "api_reference.py")
    subprocess.run([sys.executable, reference, str(SITE / "api")], check=True, cwd=CHECKOUT)
    print(f"{SITE}: python -m http.server --directory {SITE} (the search needs a server)")


if __name__ == "__main__":
    main()
