"""Adds up the results that test runs left in build folders: `summary.py build build-asan ...`; prints totals last."""

import json
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

FIELDS = ("passed", "failed", "skipped")


def of_meson(log: Path) -> Counter[str]:
    """One count per Meson test, which is a program; its log has one JSON object a line."""
    kinds = {"OK": "passed", "EXPECTEDFAIL": "passed", "SKIP": "skipped"}
    return Counter(kinds.get(json.loads(line)["result"], "failed") for line in log.read_text().splitlines())


def of_pytest(report: Path) -> Counter[str]:
    total: Counter[str] = Counter()
    for suite in ElementTree.parse(report).iter("testsuite"):
        number = {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
        failed = number["failures"] + number["errors"]
        total += Counter(failed=failed, skipped=number["skipped"], passed=number["tests"] - failed - number["skipped"])
    return total


def main(folders: list[str]) -> None:
    total: Counter[str] = Counter()
    print()
    for folder in map(Path, folders):
        for reader, file in ((of_meson, folder / "meson-logs" / "testlog.json"), (of_pytest, folder / "pytest.xml")):
            if file.is_file():
                counts = reader(file)
                total += counts
                print(f"{file}: " + ", ".join(f"{counts[name]} {name}" for name in FIELDS))
    print("\n" + ", ".join(f"{total[name]} {name}" for name in FIELDS))


if __name__ == "__main__":
    main(sys.argv[1:])
