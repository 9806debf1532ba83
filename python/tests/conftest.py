"""The tests share the reference and the reading of arrays with tests/conformance."""

import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "conformance"))

# What a shell runs in the background ignores SIGINT, and so would what the tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
