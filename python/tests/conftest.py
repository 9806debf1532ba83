"""The tests share the reference and the reading of arrays with tests/conformance."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "conformance"))
