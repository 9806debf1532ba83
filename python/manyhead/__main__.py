"""`python -m manyhead`: version, instruction sets, caches and threads of this installation."""

from __future__ import annotations

import argparse
import json
import sys

from ._library import Error
from ._runtime import describe


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m manyhead", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    options = parser.parse_args(arguments)
    try:
        facts = describe()
    except (ValueError, Error) as error:  # MH_ISA or MH_THREADS asks for something that is not there
        print(f"manyhead: {error}", file=sys.stderr)
        return 1
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
    rows += [(name.replace("_", " "), value) for name, value in facts["machine"].items() if name not in facts]
    for name, value in rows:
        print(f"{name:<16} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
