"""`python -m manyhead`: the command line, commands/__init__.py."""

from __future__ import annotations

import sys

from .commands import main

if __name__ == "__main__":
    sys.exit(main())
