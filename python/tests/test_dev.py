"""./dev, as far as it can be tried without a build."""

import subprocess
from pathlib import Path

import pytest

DEV = Path(__file__).parents[2] / "dev"


@pytest.mark.parametrize(
    ("command", "said"),
    [("sweep", "--shapes N"), ("modifiers", "--head-dim N"), ("peers", "--markdown"), ("torch-sweep", "--layers")],
)
def test_help_needs_no_build(tmp_path, command, said):
    done = subprocess.run(
        ["/bin/bash", DEV, command, "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and done.stderr == ""
    assert said in done.stdout and "\\n" not in done.stdout
