"""A plan in words, and the time it should take: with rates that are measured now, or taken from a saved profile."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from ..commands.errors import UserError
from ..report import units
from .cases import Row
from .instruments import Instruments, Planned
from .limits import EASY, LOOK, Limits
from .predict import GUESSED, Rates, Shape, predict, traffic, unit_of
from .sweep import Watch, too_large

LOOKS = 40  # at a rate: a second for all of them
ROUNDS = 5  # of measuring, each after another look at the rates
HOLDS = 0.25  # a prediction is meant to be so near
UNEVEN = 1.1
SOFTMAX_COSTS = 0.25

Explanation = dict[str, Any]


class RateSource(Protocol):
    origin: str

    def look(self, planned: Planned) -> None:
        """Once more at the rates of a plan, while the machine is as it is."""

    def rates(self, planned: Planned) -> Rates: ...


class MeasuredRates:
    """Looked at again and again: the highest counts, because what else runs on a machine can only lower them."""

    origin = "measured now"

    def __init__(self, tools: Instruments, machine: Mapping[str, Any], available: int) -> None:
        self.tools = tools
        self.limits = Limits(tools, machine, available, LOOKS // 2)
        self.l2_bytes = machine["l2_bytes"]
        self.clock = 0.0

    def look(self, planned: Planned) -> None:
        self.limits.look_at_arithmetic(planned.isa, unit_of(planned), planned.threads)
        self.clock = max(self.clock, self.tools.clock_rate(LOOK / 4))
        self.limits.look_at_size(*self._read_key(planned))

    def _read_key(self, planned: Planned) -> tuple[int, int]:
        """Bytes and threads: as many bytes as the call moves, since caches that neighbours share have no sharp end."""
        return min(max(self._moved(planned), 1 << 14), self.limits.levels[-1].probe), planned.threads

    def _moved(self, planned: Planned) -> int:
        return int(traffic(planned, self.l2_bytes))

    def rates(self, planned: Planned) -> Rates:
        key = self._read_key(planned)
        if not self.limits.of_size(*key):
            # Memory is filled before it is read: large parts of it less often.
            for _ in range(max(3, min(LOOKS, LOOKS * EASY // (4 * key[0])))):
                self.look(planned)
        arithmetic = self.limits.arithmetic(planned.isa, unit_of(planned), planned.threads)
        return Rates(
            arithmetic, self.clock, self._moved(planned), self.limits.of_size(*key), self.limits.level(*key).name
        )


class SavedRates:
    """Those that `manyhead profile --json` measured, perhaps on another machine."""

    def __init__(self, document: Mapping[str, Any], path: str) -> None:
        self.machine: Mapping[str, Any] = document["machine"]
        self.limits = document["limits"]
        self.path = path
        self.origin = f"of {path}: {self.machine.get('cpu', 'an unknown CPU')}"

    def look(self, planned: Planned) -> None:
        pass

    def rates(self, planned: Planned) -> Rates:
        try:
            unit, moved = unit_of(planned), traffic(planned, self.machine["l2_bytes"])
            rates = {
                entry["threads"]: entry["rate"]
                for entry in self.limits["arithmetic"]
                if (entry["isa"], entry["dtype"]) == (planned.isa, unit)
            }
            arithmetic = _of_threads(rates, planned.threads)
            reads: dict[int, dict[str, tuple[int, float]]] = {}
            for entry in self.limits["read"]:
                reads.setdefault(entry["threads"], {})[entry["level"]] = entry["bytes"], entry["rate"]
            read = _of_threads({n: _at(moved, list(levels.values())) for n, levels in reads.items()}, planned.threads)
            level = next((key for key, (size, _) in reads[min(reads)].items() if moved <= size), "memory")
            clock = self.limits["clock"]["most"]
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{self.path} has no limits for {unit_of(planned)} on {planned.isa}: measure that with "
                "manyhead profile --json there, or leave out --limits"
            ) from error
        return Rates(arithmetic, clock, moved, read, level)


def _of_threads(rates: Mapping[int, float], threads: int) -> float:
    """Of the nearest number of threads that was measured, a thread's part of it as often as needed."""
    nearest = min(rates, key=lambda number: abs(number - threads))
    return rates[nearest] * threads / nearest


def _at(size: float, known: Sequence[tuple[int, float]]) -> float:
    """The rate of reading so many bytes, between those of the sizes that were measured."""
    known = sorted(known)
    if size <= known[0][0]:
        return known[0][1]
    for (low, fast), (high, slow) in pairwise(known):
        if size <= high:
            part = math.log(size / low) / math.log(high / low)
            return fast ** (1 - part) * slow**part
    return known[-1][1]


# --- one problem ------------------------------------------------------------------------------------------------------


def explain(row: Row, tools: Instruments, machine: Mapping[str, Any], source: RateSource | None) -> Explanation:
    """Everything about a row but its measured time. `source`: None = the plan alone."""
    planned = tools.Planned(row.line, isa=row.isa, threads=row.threads)
    found: Explanation = {
        "name": row.case.name,
        "problem": planned.line,
        "isa": planned.isa,
        "threads": planned.threads,
        "route": planned.route,
        "plan": planned.plan,
        "pairs": planned.flops / (2 * sum(_dims(planned))),
        "words": _words(planned),
        "rates": None,
        "predicted": None,
        "measured": None,
        "advice": _advice(planned, row, machine),
    }
    if source is not None:
        _add_prediction(found, planned, machine, source)
    return found


def _add_prediction(found: Explanation, planned: Planned, machine: Mapping[str, Any], source: RateSource) -> None:
    rates = source.rates(planned)
    prediction = predict(planned, rates)
    found["rates"] = asdict(rates) | {"origin": source.origin}
    found["predicted"] = asdict(prediction)
    found["advice"] = _advice_of_time(prediction.terms, prediction.limit, planned, machine) + found["advice"]


def measure(
    row: Row,
    tools: Instruments,
    machine: Mapping[str, Any],
    source: RateSource,
    *,
    available: int,
    seconds: float,
    phases: bool,
) -> Explanation:
    """Prediction and measurement in turn, so that both see the same machine."""
    if why_not := too_large(row, available):
        raise UserError(f"{row.line} cannot be run here: {why_not}")
    workload = tools.Workload(row.line, isa=row.isa, threads=row.threads)
    workload.run()  # brings code and data close
    times = np.empty(0)
    source.rates(workload)
    for _ in range(ROUNDS):
        source.look(workload)
        times = np.append(times, workload.measure(seconds / ROUNDS, 10_000))
    found = explain(row, tools, machine, source)
    found["measured"] = {
        "best": float(times.min()),
        "median": float(np.median(times)),
        "runs": len(times),
        "phases": None,
    }
    if phases:
        profiled = workload.phases()
        if profiled["phases"]:
            # A profiled run takes a little longer; of a call's threads, each has its part.
            part = found["measured"]["best"] / profiled["seconds"] / profiled["threads"]
            found["measured"]["phases"] = {name: spent * part for name, spent in profiled["phases"].items()}
    found["ratio"] = found["predicted"]["seconds"] / found["measured"]["best"]
    return found


def table(
    rows: Sequence[Row],
    tools: Instruments,
    machine: Mapping[str, Any],
    source: RateSource,
    *,
    available: int,
    seconds: float,
    watch: Watch,
) -> Iterator[Explanation]:
    """Each row when it is done, so that an interrupt leaves those before it."""
    watch.plan(len(rows))
    for row in rows:
        watch.now(str(row))
        if too_large(row, available):
            yield explain(row, tools, machine, source)
        else:
            yield measure(row, tools, machine, source, available=available, seconds=seconds, phases=False)
        watch.done(1)


# --- in words ---------------------------------------------------------------------------------------------------------


def _dims(planned: Planned) -> tuple[int, int]:
    p = planned.problem
    return p.head_dim, p.v_dim or p.head_dim


def _words(planned: Planned) -> list[tuple[str, str]]:
    """What the library is going to do: what about, and the sentence."""
    plan, shape = planned.plan, Shape(planned)
    route = {
        "tile": f"panels of up to {shape.core.panel * shape.lanes} rows against tiles of {plan['block_kv']} keys; the "
        "scores of both stay in L1",
        "decode": f"the few rows of a KV head against tiles of {plan['block_kv']} keys, each read once for all rows",
        "matrix": f"panels of 32 rows against tiles of {plan['block_kv']} keys on the CPU's matrix unit",
    }[planned.route]
    said = [("kernel", f"the {planned.route} route on {planned.isa}: {route}")]
    tasks = f"{units.plural(plan['tasks'], 'task')} of up to {units.plural(min(plan['block_q'], shape.rows), 'row')}"
    if planned.threads == 1:
        said.append(("tasks", f"{tasks}, on one thread"))
    else:
        share = f"the busiest does {plan['balance']:.2f} times the mean"
        said.append(("tasks", f"{tasks}, on {planned.threads} threads, of which {share}"))
    if plan["chunks"] > 1:
        chunks = f"{plan['chunks']} chunks of {plan['chunk_keys']}, whose results are merged in order"
        said.append(("keys", f"split into {chunks}, because there are few rows to keep threads busy with"))
    said.append(("K and V", _copies(planned, shape)))
    if plan["tiles_skipped"] > 0:
        said.append(("left out", f"{units.percent(plan['tiles_skipped'])} of the tiles, which nobody attends to"))
    if plan["second_pass"]:
        said.append(("twice", "scores and weights are computed again for what was asked for besides the result"))
    workspace = f"{units.size(plan['scratch_bytes_per_thread'])} for each thread"
    shared = f", {units.size(plan['shared_bytes'])} for all together" if plan["shared_bytes"] else ""
    said.append(("workspace", workspace + shared))
    pairs = planned.flops / (2 * sum(_dims(planned)))
    each = f"2 x ({' + '.join(map(str, _dims(planned)))})"
    said.append(("work", f"{units.rate(planned.flops, 'FLOP')}: {units.number(pairs)} pairs of query and key x {each}"))
    said.append(("bytes", f"{units.size(planned.bytes)} of Q, K, V and the result, each once"))
    return said


def _copies(planned: Planned, shape: Shape) -> str:
    if planned.route == "matrix":
        return "brought into the unit's order tile by tile, once for each task; V is transposed"
    if not planned.plan["copies_kv"]:
        return "read where they lie, without a copy"
    if planned.route == "decode":
        return f"copied tile by tile, because rows of {shape.d} and {shape.v} are not whole vectors of {shape.lanes}"
    if shape.item == 2:
        return "made f32 tile by tile, once for each task"
    return "copied tile by tile: rows a multiple of 1 KiB apart would push each other out of L1"


def _advice(planned: Planned, row: Row, machine: Mapping[str, Any]) -> list[str]:
    """What would make it faster, as far as the plan alone tells."""
    plan, shape = planned.plan, Shape(planned)
    said = []
    best = next((name for name, runs in machine["isas"].items() if runs), planned.isa)
    if planned.isa != best:
        said.append(f"This CPU also runs {best}.")
    if planned.threads < row.threads:
        if planned.threads == 1 and plan["tasks"] > 1:
            said.append(
                "It is so little work that one thread is done before a second is awake: more heads or batch entries in "
                "a call would give the others something to do."
            )
        else:
            said.append(f"There are tasks for {planned.threads} of the {row.threads} threads only.")
    if plan["balance"] > UNEVEN:
        said.append(f"Threads wait for the busiest, which has {plan['balance']:.2f} times the mean to do.")
    if plan["copies_kv"] and shape.item > 2:
        if planned.route == "decode":
            said.append(f"A head size that is a multiple of {shape.lanes} needs no copies.")
        else:
            said.append("K and V as [batch, heads, length, head_dim] need no copies.")
    if planned.dtype == "f64":
        said.append("f32 does twice as many multiply-adds at a time, and moves half the bytes.")
    return said


def _advice_of_time(terms: Mapping[str, float], limit: str, planned: Planned, machine: Mapping[str, Any]) -> list[str]:
    """What would make it faster, as far as the largest terms tell."""
    said = []
    prefill = planned.route != "decode" and not planned.plan["second_pass"]
    if prefill and limit == "arithmetic" and planned.dtype == "f32" and machine["isas"].get("amx"):
        said.append("bf16 or f16 would run on the matrix unit of this CPU, with isa amx.")
    if limit.startswith("read") and planned.dtype in ("f32", "f64"):
        said.append("It waits for memory: K and V in bf16 or f16 are fewer bytes.")
    if prefill and terms["softmax"] > SOFTMAX_COSTS * (sum(terms.values()) - terms["read"]):
        said.append("The softmax of a score costs the same whatever the head size: fewer and larger heads have fewer.")
    if planned.plan["second_pass"]:
        said.append("Weights, their sums and scores take a second pass: leave them out where nobody reads them.")
    if planned.isa in GUESSED:
        said.append(f"Of {planned.isa} little has been measured: take the prediction as a guess.")
    return said
