"""Documents as `manyhead profile` writes them, made up: for tests of what reads them."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import manyhead

GFLOPS = {"amx": 900.0, "avx512": 210.0, "avx2": 105.0, "sse2": 28.0}  # of one thread
READ = {"L1": (48 << 10, 300.0), "L2": (2 << 20, 120.0), "L3": (32 << 20, 40.0), "memory": (1 << 30, 12.0)}
SHARES = {
    "pack": 3,
    "scores": 38,
    "mask": 2,
    "softmax": 19,
    "values": 30,
    "store": 2,
    "merge": 1,
    "weights": 0,
    "idle": 5,
}


def workloads() -> list[tuple[str, str, str]]:
    """Names, problems without their dtype, and what they stand for."""
    table = []
    for line in (Path(manyhead.__file__).parent / "workloads.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, b, h, kv_heads, q, kv, d, causal, what = line.split(None, 8)
            heads = h if h == kv_heads else f"{h}/{kv_heads}"
            table.append((name, f"b{b} h{heads} q{q} kv{kv} d{d}{' causal' if causal == '1' else ''}", what))
    return table


def arithmetic(isa: str, dtype: str, threads: int) -> float:
    rate = GFLOPS[isa] if dtype == "bf16" or isa != "amx" else GFLOPS["avx512"]
    return rate * threads * 0.97 * 1e9


def make_row(
    series: str,
    name: str,
    problem: str,
    *,
    isa: str = "avx512",
    threads: int = 2,
    x: float | None = None,
    what: str = "",
) -> dict[str, Any]:
    """A row whose figures agree with each other."""
    chance = random.Random(f"{series}{name}{problem}{isa}{threads}{x}")
    words = {word.rstrip("0123456789/"): word for word in problem.split()[1:6]}
    dtype = problem.split()[0]
    heads, _, kv_heads = words["h"][1:].partition("/")
    b, q, d = (int(words[key][1:]) for key in "bqd")
    kv = int(words["kv"][2:])
    flops = 4.0 * b * int(heads) * q * kv * d / (2 if "causal" in problem else 1)
    size = 2 if dtype == "bf16" else 4
    moved = float(size * b * d * (2 * int(heads) * q + 2 * int(kv_heads or heads) * kv))
    level = next((level for level, (most, _) in READ.items() if moved <= most), "memory")
    at_arithmetic = flops / arithmetic(isa, dtype, threads)
    at_reading = moved / (READ[level][1] * threads * 1e9)
    bound = max(at_arithmetic, at_reading)
    best = bound / chance.uniform(0.55, 0.85) + 3e-6
    share = bound / best
    limit = "overhead" if share < 0.2 else "arithmetic" if at_arithmetic > at_reading else f"read {level}"
    samples = sorted(best * (1 + abs(chance.gauss(0, 0.03))) for _ in range(20))
    samples[0] = best
    weights = {phase: weight * chance.uniform(0.7, 1.3) for phase, weight in SHARES.items()}
    if "causal" not in problem:
        weights["mask"] = 0.0
    return {
        "series": series,
        "name": name,
        "what": what,
        "x": x,
        "problem": problem,
        "dtype": dtype,
        "isa": isa,
        "route": "tile",
        "threads": threads,
        "seconds": {"best": best, "median": samples[10], "p90": samples[18], "runs": 20, "samples": samples},
        "flops": flops,
        "bytes": moved,
        "flops_rate": flops / best,
        "bytes_rate": moved / best,
        "limit": limit,
        "limit_rate": flops / bound,
        "share": share,
        "phases": {phase: best * threads * weight / sum(weights.values()) for phase, weight in weights.items()},
        "counters": None,
        "note": None,
    }


def make_document(**changes: Any) -> dict[str, Any]:
    """A complete profile with every series."""
    rows = []
    for name, problem, what in workloads():
        rows.append(make_row("table", name, f"f32 {problem}", what=what))
        rows.append(make_row("table", name, f"bf16 {problem}", what=what, isa="amx"))
    for shape in ("f32 b1 h16 q{0} kv{0} d64", "bf16 b1 h16 q{0} kv{0} d64", "f32 b1 h16 q1 kv{0} d64"):
        for power in range(7, 14):
            problem = shape.format(2**power)
            rows.append(
                make_row("sequence", f"s{2**power}", problem, x=2**power, isa="avx512" if "f32" in shape else "amx")
            )
    for name, problem in (
        ("llama8b_2k", "b1 h32/8 q2048 kv2048 d128 causal"),
        ("gpt2_small", "b1 h12 q1024 kv1024 d64"),
    ):
        for threads in (1, 2, 4, 8):
            row = make_row("threads", name, f"f32 {problem}", threads=threads, x=threads)
            rows.append(row)
    for power in range(7):
        rows.append(
            make_row("heads", f"heads_{2**power}", f"f32 b1 h{2**power} q1024 kv1024 d{1024 >> power}", x=2**power)
        )
    threads = (1, 2)
    return {
        "format": "manyhead-profile",
        "format_version": 1,
        "manyhead": "0.1.0",
        "created": "2026-01-31T12:00:00Z",
        "arguments": ["--seconds", "0.5"],
        "seconds": 97.3,
        "complete": True,
        "machine": {
            "version": "0.1.0",
            "cpu": "Example Xeon(R) 8480",
            "isa": "amx",
            "isas": {"amx": True, "avx512": True, "avx2": True, "sse2": True, "neon": False},
            "threads": 2,
            "cpus": 4,
            "cores": 2,
            "numa_nodes": 1,
            "l1_bytes": 48 << 10,
            "l2_bytes": 2 << 20,
            "l3_bytes": 32 << 20,
            "memory_bytes": 24 << 30,
            "os": "Linux 6.1",
        },
        "limits": {
            "arithmetic": [
                {"isa": isa, "dtype": dtype, "threads": count, "rate": arithmetic(isa, dtype, count)}
                for isa in GFLOPS
                for dtype in ("f32", "bf16")
                for count in threads
            ],
            "read": [
                {"level": level, "bytes": size, "threads": count, "rate": rate * count * 1e9}
                for level, (size, rate) in READ.items()
                for count in threads
            ],
            "clock": {"first": 3.1e9, "last": 3.0e9, "least": 2.9e9, "most": 3.1e9},
            "noise": 0.03,
            "drift": -0.03,
        },
        "rows": rows,
    } | changes


def make_comparison(*documents: dict[str, Any]) -> dict[str, Any]:
    """The table rows of the documents, matched by their place."""
    table = [[row for row in document["rows"] if row["series"] == "table"] for document in documents]
    rows = []
    for matched in zip(*table, strict=False):
        seconds = [row["seconds"]["best"] for row in matched]
        ratios = [seconds[0] / other for other in seconds]
        rows.append(
            {key: matched[0][key] for key in ("name", "problem", "dtype", "isa", "threads")}
            | {"seconds": seconds, "ratios": ratios, "significant": [abs(math.log(ratio)) > 0.05 for ratio in ratios]}
        )
    means = [
        math.exp(sum(math.log(row["ratios"][index]) for row in rows) / len(rows)) if rows else None
        for index in range(len(documents))
    ]
    named = [{"label": f"run {'abcdef'[index]}", "document": document} for index, document in enumerate(documents)]
    return {"documents": named, "rows": rows, "geomean": means}
