"""The options of peers.py and torch_sweep.py, apart from what those import: help is there before anything is installed.

python options.py peers     what `./dev peers --help` prints
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path


def _parser(name: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"{name}.py", description=description)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: all CPUs")
    return parser


def peers() -> argparse.ArgumentParser:
    parser = _parser(
        "peers", "Times manyhead beside the other libraries on the rows of workloads.txt and prints the ratios."
    )
    parser.add_argument("--rows", default="*", help="names of workloads, separated by commas; patterns with *")
    parser.add_argument("--dtype", default="f32", help="f32, bf16, f16, or several separated by commas")
    parser.add_argument("--only", help="contestants, separated by commas; default: all that are installed")
    parser.add_argument("--rounds", type=int, default=6, help="alternating rounds a row (default 6)")
    parser.add_argument("--seconds", type=float, default=0.3, help="time of a contestant in a round (default 0.3)")
    parser.add_argument("--json", type=Path, help="write everything that was measured to this file")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    return parser


def torch_sweep() -> argparse.ArgumentParser:
    parser = _parser(
        "torch_sweep",
        "Times manyhead.attention beside PyTorch's own on problems drawn at random, or the layer, and prints the "
        "worst ratios. What differs from PyTorch by more than rounding is an error.",
    )
    parser.add_argument("--dtype", default="f32", choices=("f32", "bf16", "f16"))
    parser.add_argument("--layers", action="store_true", help="torch.nn.MultiheadAttention instead")
    parser.add_argument("--masks", help="kinds to draw from, separated by commas (default none,none,none,bool,bias)")
    parser.add_argument("--number", type=int, default=200, help="problems (default 200)")
    parser.add_argument("--seed", type=int, default=1, help="of the problems (default 1)")
    parser.add_argument("--list", type=int, default=15, help="how many of the worst to print (default 15)")
    return parser


if __name__ == "__main__":
    {"peers": peers, "torch_sweep": torch_sweep}[sys.argv[1]]().print_help()
