"""A plan in words, and the time it should take: with rates that are measured now, or taken from a saved profile."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple, Protocol

import numpy as np

from .. import _abi
from .._user import UserError
from ..report import units
from .cases import Row
from .instruments import Instruments, Planned, Workload
from .limits import EASY, LOOK, Limits, reading_rate
from .predict import GUESSED, UNITS, Rates, Shape, predict, traffic, unit_of
from .sweep import Watch, too_large

LOOKS = 15  # at the rates: a second for all of them
GLANCES = 3  # of a look, at what takes no longer than a moment
ROUNDS = 5  # of measuring, each after another look at the rates
ATTEMPTS = 3  # at a row, while the machine is not quiet
QUIET = 0.9  # of the best: what rates and times reach in most rounds while nothing disturbs them
HOLDS = 0.25  # a prediction is meant to be so near
UNEVEN = 1.1
SOFTMAX_COSTS = 0.25

Explanation = dict[str, Any]


class RateSource(Protocol):
    origin: str

    def look(self, planned: Planned) -> Rates:
        """The rates of a plan, as the machine is at this moment."""

    def rates(self, planned: Planned) -> Rates:
        """The same, in the best of some moments."""

    def most(self, planned: Planned) -> float:
        """The highest rate of its multiply-adds that was ever seen."""


class MeasuredRates:
    origin = "measured now"

    def __init__(self, tools: Instruments, machine: Mapping[str, Any], available: int) -> None:
        self.tools = tools
        self.limits = Limits(tools, machine, available, LOOKS)
        self.l2_bytes = machine["l2_bytes"]

    def look(self, planned: Planned) -> Rates:
        threads = planned.threads
        moved = int(traffic(planned, self.l2_bytes))
        # As many bytes as the call moves, since caches that neighbours share have no sharp end.
        size = min(max(moved, 1 << 14), self.limits.levels[-1].probe)
        return Rates(
            arithmetic=max(self.limits.look_at_arithmetic(*self._unit(planned)) for _ in range(GLANCES)),
            clock=max(self.tools.clock_rate(LOOK / 4) for _ in range(GLANCES)),
            moved=moved,
            read=max(reading_rate(self.tools, size, threads) for _ in range(GLANCES if size <= EASY // 4 else 1)),
            level=self.limits.level(size, threads).name,
        )

    def rates(self, planned: Planned) -> Rates:
        first = self.look(planned)
        # Memory is filled before it is read: large parts of it less often.
        more = max(2, min(LOOKS, int(LOOKS * EASY / 4 / max(first.moved, 1))))
        return best_of([first, *(self.look(planned) for _ in range(more))])

    def most(self, planned: Planned) -> float:
        return self.limits.arithmetic(*self._unit(planned))

    @staticmethod
    def _unit(planned: Planned) -> tuple[str, str, int]:
        return planned.isa, unit_of(planned), planned.threads


def best_of(looks: Sequence[Rates]) -> Rates:
    """The highest counts, because what else runs on a machine can only lower them."""
    arithmetic, clock, read = (max(getattr(look, rate) for look in looks) for rate in ("arithmetic", "clock", "read"))
    return replace(looks[0], arithmetic=arithmetic, clock=clock, read=read)


class SavedRates:
    """Those that `manyhead profile --json` measured, perhaps on another machine."""

    def __init__(self, document: Mapping[str, Any], path: str) -> None:
        self.machine: Mapping[str, Any] = document["machine"]
        self.limits = document["limits"]
        self.path = path
        self.origin = f"of {path}: {self.machine.get('cpu', 'an unknown CPU')}"

    def look(self, planned: Planned) -> Rates:
        return self.rates(planned)

    def most(self, planned: Planned) -> float:
        return self.rates(planned).arithmetic

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
    found = _explain_plan(row, planned, machine)
    if source is not None:
        _add_prediction(found, planned, machine, source.rates(planned), source.origin)
    return found


def _explain_plan(row: Row, planned: Planned, machine: Mapping[str, Any]) -> Explanation:
    return {
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


def _add_prediction(
    found: Explanation, planned: Planned, machine: Mapping[str, Any], rates: Rates, origin: str
) -> None:
    prediction = predict(planned, rates)
    found["rates"] = asdict(rates) | {"origin": origin}
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
    tried = []
    for _ in range(ATTEMPTS):
        tried.append(_attempt(workload, source, seconds))
        if tried[-1].quiet:
            break
    best = tried[-1] if tried[-1].quiet else min(tried, key=lambda attempt: attempt.times.min())
    found = _explain_plan(row, workload, machine)
    _add_prediction(found, workload, machine, best.rates, source.origin)
    found["measured"] = {
        "best": float(best.times.min()),
        "median": float(np.median(best.times)),
        "runs": len(best.times),
        "quiet": best.quiet,
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


class _Attempt(NamedTuple):
    rates: Rates
    times: np.ndarray
    quiet: bool


def _attempt(workload: Workload, source: RateSource, seconds: float) -> _Attempt:
    looks, times = [], []
    for _ in range(ROUNDS):
        looks.append(source.look(workload))
        times.append(workload.measure(seconds / ROUNDS, 10_000))
    # What the usual round reached of the best one. Of the multiply-adds it is the best ever: a neighbour who shares the
    # core can slow them down for seconds on end.
    read = [look.read for look in looks]
    speed = [1 / float(of_round.min()) for of_round in times]
    steady = min(median(read) / max(read), median(speed) / max(speed))
    steady = min(steady, median(look.arithmetic for look in looks) / source.most(workload))
    return _Attempt(best_of(looks), np.concatenate(times), steady >= QUIET)


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
    plan, shape, outputs = planned.plan, Shape(planned), planned.problem.outputs
    unit = f"with {UNITS[planned.isa].name}" if planned.isa in UNITS else ""
    route = {
        "tile": f"panels of up to {shape.core.panel * shape.lanes} rows against tiles of {plan['block_kv']} keys; the "
        "scores of both stay in L1",
        "decode": f"the few rows of a KV head against tiles of {plan['block_kv']} keys, each read once for all rows",
        "matrix": f"panels of 32 rows against tiles of {plan['block_kv']} keys, {unit}",
    }[planned.route]
    if plan.get("unit_steps"):
        route += f", {unit}"
    if last := plan["last_rows"]:
        route += f"; of each head the last {units.plural(last, 'row')} as a decode step"
    said = [("kernel", f"the {planned.route} route on {planned.isa}: {route}")]
    most = min(plan["block_q"] + plan["last_rows"], shape.rows)
    tasks = f"{units.plural(plan['tasks'], 'task')} of up to {units.plural(most, 'row')}"
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
    if outputs & (_abi.OUTPUT_WEIGHTS | _abi.OUTPUT_MEAN_WEIGHTS | _abi.OUTPUT_COLUMN_SUMS):
        said.append(("weights", "from scores that are kept until the last key; their exponentials are computed again"))
    if outputs & _abi.OUTPUT_SCORES:
        said.append(("scores", "computed once more, to be written"))
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
        name = UNITS[planned.isa].name
        return f"brought into the order of {name} tile by tile, once for each task: V, and K unless it is so already"
    if not planned.plan["copies_kv"]:
        asked = ", asked for in the order of memory" if planned.plan.get("asks_in_order") else ""
        if planned.plan.get("unit_steps"):
            return f"read where they lie, K without a copy, two rows of V joined at a time{asked}"
        return f"read where they lie, without a copy{asked}"
    if planned.route == "decode":
        return f"copied tile by tile, because rows of {shape.d} and {shape.v} are not whole vectors of {shape.lanes}"
    if shape.item == 2:
        return "made f32 tile by tile, once for each task"
    return "copied tile by tile: rows a multiple of 1 KiB apart would push each other out of L1"


def _best_isa(machine: Mapping[str, Any]) -> str:
    """The instruction set that is the default here: the first one that runs, as they stand in order."""
    return next((name for name, runs in machine["isas"].items() if runs), "")


def _advice(planned: Planned, row: Row, machine: Mapping[str, Any]) -> list[str]:
    """What would make it faster, as far as the plan alone tells."""
    plan, shape = planned.plan, Shape(planned)
    said = []
    best = _best_isa(machine)
    if best and planned.isa != best:
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
    prefill = planned.route != "decode"
    if prefill and limit == "arithmetic" and planned.dtype == "f32":
        if planned.route == "matrix":
            said.append(f"{UNITS[planned.isa].name} takes six products for one of f32: bf16 takes one.")
        elif (isa := _best_isa(machine)) in UNITS:
            said.append(f"{UNITS[isa].what} would run on {UNITS[isa].name}, with isa {isa}.")
    if limit.startswith("read") and planned.dtype in ("f32", "f64"):
        said.append("It waits for memory: K and V in bf16 or f16 are fewer bytes.")
    if prefill and terms["softmax"] > SOFTMAX_COSTS * (sum(terms.values()) - terms["read"]):
        said.append("The softmax of a score costs the same whatever the head size: fewer and larger heads have fewer.")
    if planned.plan["second_pass"]:
        said.append("Weights, their sums and scores take time of their own: leave them out where nobody reads them.")
    if planned.isa in GUESSED:
        said.append(f"Of {planned.isa} little has been measured: take the prediction as a guess.")
    return said
