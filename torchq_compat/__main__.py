"""Run ``python -m torchq_compat``, the same command as ``torchq-compat``."""

import sys

from torchq_compat.cli import main

if __name__ == "__main__":
    sys.exit(main())
