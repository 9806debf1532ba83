"""Version, instruction sets, caches and threads of this installation."""

from __future__ import annotations

import argparse
import json

from .._runtime import describe
from ..profiling.predict import UNITS

SUMMARY = "what this installation is and runs on (the default)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(options: argparse.Namespace) -> int:
    facts = describe()
    if options.json:
        print(json.dumps(facts, indent=2))
        return 0
    supported = [f"{name}{'' if runs else ' (not on this CPU)'}" for name, runs in facts["isas"].items()]
    rows = [
        ("manyhead", facts["version"]),
        ("library", facts["library"]),
        ("instruction set", facts["isa"]),
        ("built for", ", ".join(supported)),
        ("threads", facts["threads"]),
    ]
    machine = {name: value for name, value in facts["machine"].items() if name not in facts}
    on_unit = machine.pop("f32_on_unit", False)
    unit = UNITS.get(facts["isa"])
    if unit and "f32" in unit.softmax:
        rows.append((f"f32 on {unit.name}", "yes" if on_unit else "no"))
    rows += [(name.replace("_", " "), value) for name, value in machine.items()]
    for name, value in rows:
        print(f"{name:<16} {value}")
    return 0
