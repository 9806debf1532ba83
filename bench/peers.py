"""Times manyhead beside the other libraries on the rows of workloads.txt and prints the ratios.

Every library runs in a process of its own (contestants.py), stopped while it is not its turn, so that no thread pool
spins in another one's time. For each row: all of them compute the same inputs, a sample of each result is compared with
float64, then they are timed in alternating rounds, with the rate of multiply-adds and of reading memory measured in the
same rounds; the fastest call of all rounds counts. A library that is not installed is left out, one whose result is
wrong is not timed.
"""

from __future__ import annotations

import fnmatch
import json
import os
import signal
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import options as options_of
from contestants import (
    CONTESTANTS,
    ITEM_SIZE,
    TOLERANCE,
    Row,
    Workload,
    limit_seconds,
    make_inputs,
    read_workloads,
    reference_rows,
)

HERE = Path(__file__).resolve().parent
OURS, BOUND = "manyhead", "manyhead-bound"
# Not peers: this library again, a part of the work, and one with less precise inputs than the row says.
NOT_PEERS = (BOUND, "bare products", "ggml-f16")


class Worker:
    """A process that answers each line of JSON with one, and is stopped in between."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        # In a group of its own: Ctrl-C is for this program alone, which then ends the others.
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env=os.environ | env,
            process_group=0,
        )

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise ChildProcessError(f"the process ended with status {self.process.wait()}")
        os.kill(self.process.pid, signal.SIGSTOP)
        return json.loads(line)

    def call(self, **command: Any) -> dict[str, Any]:
        os.kill(self.process.pid, signal.SIGCONT)
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        return self.read()

    def end(self) -> None:
        with self.process:  # closes the pipes and waits
            self.process.kill()


def start(names: list[str], threads: int, workers: dict[str, Worker]) -> dict[str, str]:
    """Fills `workers` with the contestants that are installed; their versions."""
    versions = {}
    for name in names:
        pools = 1 if name == "bare products" else threads
        env = {key: str(pools) for key in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
        worker = Worker([sys.executable, str(HERE / "contestants.py"), name, str(threads)], env)
        workers[name] = worker
        try:
            hello = worker.read()
        except ChildProcessError as error:
            hello = {"absent": str(error)}
        if "absent" in hello:
            workers.pop(name).end()
            if name == OURS:
                raise SystemExit(f"peers.py: manyhead does not load: {hello['absent']}")
            print(f"without {name}: {hello['absent']}", file=sys.stderr)
        else:
            versions[name] = hello["versions"]
    return versions


def disagreement(answer: dict[str, Any], expected: np.ndarray) -> str | None:
    if answer["rows"] is None:
        return None
    got = np.array(answer["rows"])
    tolerance = TOLERANCE[answer["dtype"]]
    excess = np.abs(got - expected) - tolerance * (1 + np.abs(expected))
    if got.shape == expected.shape and (excess <= 0).all():
        return None
    return f"wrong: off by {np.nanmax(np.abs(got - expected)):.2g}, {np.isnan(got).sum()} NaN"


class Probe:
    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.worker = Worker([sys.executable, str(HERE / "probe.py")], {})
        try:
            self.machine = self.worker.read()
        except ChildProcessError as error:
            raise SystemExit(f"peers.py: manyhead cannot look at the machine: {error}") from None

    def measure(self, kv_bytes: int) -> dict[str, float]:
        def ask(threads: int) -> dict[str, float]:
            return self.worker.call(threads=threads, size=kv_bytes, seconds=0.02)

        one = ask(1)
        all_of_them = ask(self.threads) if self.threads > 1 else one
        return {f"{name}1": rate for name, rate in one.items()} | all_of_them


def measure_row(
    w: Row, dtype: str, workers: dict[str, Worker], probe: Probe, rounds: int, seconds: float
) -> dict[str, Any]:
    inputs = make_inputs(w, dtype)
    expected = reference_rows(w, *inputs)
    del inputs
    notes: dict[str, str] = {}
    times: dict[str, list[dict[str, float]]] = {}
    for name, worker in list(workers.items()):
        try:
            answer = worker.call(do="prepare", row=w.name, dtype=dtype)
        except ChildProcessError as error:
            notes[name] = str(error)
            del workers[name]
            continue
        note = answer.get("unsupported") or disagreement(answer, expected)
        if note:
            notes[name] = note
        else:
            times[name] = []
    rates: list[dict[str, float]] = []
    order = list(times)
    for _ in range(rounds):
        rates.append(probe.measure(w.kv_bytes(dtype)))
        for name in order:
            times[name].append(workers[name].call(do="time", seconds=seconds))
        order = order[1:] + order[:1]
    results = {
        name: {
            "seconds": min(t["min"] for t in rows),
            "median_seconds": statistics.median(t["median"] for t in rows),
            "value": w.value(min(t["min"] for t in rows), dtype),
        }
        for name, rows in times.items()
    }
    # Whole products on one thread, so causal rows compute what attention skips.
    if "bare products" in results and isinstance(w, Workload):
        whole = 4 * w.batch * w.heads * w.q_len * w.kv_len * w.head_dim
        results["bare products"]["value"] = whole / results["bare products"]["seconds"] / 1e9
    row = {"name": f"{dtype}/{w.name}", "unit": w.unit, "results": results, "notes": notes}
    best = row["probe"] = {key: max(rate[key] for rate in rates) for key in rates[0]}
    if w.unit != "us":
        row["limit_seconds"] = limit_seconds(w, dtype, best["fma"], best["read"])
    return row | compare(row)


def compare(row: dict[str, Any]) -> dict[str, Any]:
    """Ours against the best peer and against what the machine can do, in time: above 1 is faster than the peer."""
    results = row["results"]
    out: dict[str, Any] = {}
    peers = {n: r["seconds"] for n, r in results.items() if n != OURS and n not in NOT_PEERS}
    if peers:
        out["best_peer"] = min(peers, key=lambda n: peers[n])
    if OURS in results:
        if peers:
            out["ratio"] = min(peers.values()) / results[OURS]["seconds"]
        if "limit_seconds" in row:
            out["share"] = row["limit_seconds"] / results[OURS]["seconds"]
    return out


class Table:
    """Prints rows as they come, in columns or as Markdown."""

    def __init__(self, names: list[str], markdown: bool) -> None:
        self.names, self.markdown = names, markdown
        self.heads = ["row", "unit", *names, "best peer", "ratio", "share", "FMA", "read"]
        self.widths = [22, 7, *(max(8, len(n)) for n in names), 11, 5, 5, 5, 5]
        self.line(self.heads)
        if markdown:
            print("|---|---|" + "---:|" * (len(self.heads) - 2))

    def line(self, cells: list[str]) -> None:
        if self.markdown:
            print("| " + " | ".join(cells) + " |", flush=True)
        else:
            first = [c.ljust(n) for c, n in zip(cells[:2], self.widths[:2], strict=True)]
            print("  ".join(first + [c.rjust(n) for c, n in zip(cells[2:], self.widths[2:], strict=True)]), flush=True)

    def row(self, row: dict[str, Any]) -> None:
        def value(name: str) -> str:
            result = row["results"].get(name)
            if result:
                return f"{result['value']:.3g}"
            return "WRONG" if row["notes"].get(name, "").startswith("wrong") else "-"

        def number(key: str, form: str) -> str:
            return format(row[key], form) if key in row else "-"

        rates = [f"{row['probe'][key]:.3g}" for key in ("fma", "read")]
        self.line([
            row["name"], row["unit"], *map(value, self.names), row.get("best_peer", "-"),
            number("ratio", ".2f"), number("share", ".0%"), *rates,
        ])  # fmt: skip


def main() -> int:
    parser = options_of.peers()
    options = parser.parse_args()

    table = read_workloads()
    patterns = options.rows.split(",")
    rows = [w for w in table.values() if any(fnmatch.fnmatch(w.name, p) for p in patterns)]
    dtypes = options.dtype.split(",")
    names = options.only.split(",") if options.only else list(CONTESTANTS)
    for wrong in [p for p in patterns if not fnmatch.filter(table, p)] + [d for d in dtypes if d not in ITEM_SIZE]:
        parser.error(f"there is no row or dtype '{wrong}'")
    for wrong in set(names) - set(CONTESTANTS):
        parser.error(f"there is no contestant '{wrong}'; there are {', '.join(CONTESTANTS)}")
    if options.rounds < 1 or options.threads < 1:
        parser.error("--rounds and --threads must be at least 1")
    if options.json:  # before the long run, not after
        try:
            options.json.touch()
        except OSError as error:
            parser.error(f"{options.json} cannot be written: {error.strerror}")

    probe = Probe(options.threads)
    workers: dict[str, Worker] = {}
    measured: list[dict[str, Any]] = []
    stopped = False
    try:
        versions = start(names, options.threads, workers)
        cpu = f"{probe.machine['cpu']}, {probe.machine['isa']}, {options.threads} threads"
        print(cpu, *(f"{name}: {text}" for name, text in versions.items()), sep="\n")
        print(
            f"Fastest call of {options.rounds} rounds of {options.seconds:g} s. FMA (GFLOP/s), read (GB/s, as many "
            "bytes as K and V): this machine's best in the same rounds; share: ours of what they allow. "
            "ratio: best peer's time / ours.\n"
        )
        printer = Table(list(workers), options.markdown)
        for dtype in dtypes:
            for w in rows:
                measured.append(measure_row(w, dtype, workers, probe, options.rounds, options.seconds))
                printer.row(measured[-1])
    except KeyboardInterrupt:
        stopped = True
    finally:
        for worker in [probe.worker, *workers.values()]:
            worker.end()

    print("\nStopped; these are the rows that were finished." if stopped else "")
    if not measured:
        return 130
    for title, units in (("prefill", ["GFLOP/s"]), ("decode", ["GB/s"]), ("all", ["GFLOP/s", "GB/s", "us"])):
        ratios = [r["ratio"] for r in measured if "ratio" in r and r["unit"] in units]
        if ratios:
            print(
                f"geometric mean of the ratio, {title}: {statistics.geometric_mean(ratios):.2f} "
                f"({len(ratios)} rows, least {min(ratios):.2f})"
            )
    skipped = [
        f"{r['name']}: {name}: {note}"
        for r in measured
        for name, note in r["notes"].items()
        if name not in NOT_PEERS or note.startswith("wrong")
    ]
    if skipped:
        print("not timed:", *skipped, sep="\n  ")
    if options.json:
        document = {"kind": "peers", "cpu": cpu, "threads": options.threads, "versions": versions, "rows": measured}
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    if stopped:
        return 130
    return 1 if any(OURS in r["notes"] or r["notes"].get(BOUND, "").startswith("wrong") for r in measured) else 0


if __name__ == "__main__":
    sys.exit(main())
