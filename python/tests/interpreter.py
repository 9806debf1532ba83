"""Runs code in a Python process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import manyhead
from manyhead import _library

PACKAGE = Path(manyhead.__file__).parent


def run_python(code, **environment):
    """A fresh interpreter, with the package that is being tested."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MH_", "MANYHEAD_"))}
    env = clean | {"PYTHONPATH": str(PACKAGE.parent), "MANYHEAD_LIBRARY": _library.path} | environment
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
