"""Write the generated pages, or check that they are up to date."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from migration.generate.pages import made_pages


def main() -> int:
    """Write or check the pages; return 1 if ``--check`` found an outdated page."""
    parser = argparse.ArgumentParser(prog="python -m migration.generate", description=__doc__)
    parser.add_argument("checkout", nargs="?", type=Path, default=Path(), help="default: this directory")
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args()
    stale = [
        (path, text)
        for path, text in made_pages(args.checkout)
        if not path.exists() or path.read_text() != text
    ]
    for path, text in stale:
        print(f"{path} {'is not as it would be made' if args.check else 'written'}", file=sys.stderr)
        if not args.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return int(bool(stale) and args.check)


if __name__ == "__main__":
    sys.exit(main())
