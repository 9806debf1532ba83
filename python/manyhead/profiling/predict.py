"""How long a call should take, from its plan and three rates of the machine: multiply-adds, clock, reading.

The time is that of the work, spread over the threads, and of the reading beside it:

    work     the two products, at the measured rate of multiply-adds times the share of it that the loops reach; and,
             in cycles for each vector of numbers, everything else that is done to scores, rows and keys
    reading  the bytes that come from where they lie, at the rate of reading as many again and again
    time     the longer of the two, a part of the shorter, and what a call costs anyway: one hides behind the other, but
             for the moments in which there is only one of them to do

What a core needs is told in cycles and in shares of its own multiply-adds, so that the table below holds for others.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from .. import _abi
from .instruments import Planned


class Core(NamedTuple):
    """What the loops need on a kind of core. Cycles are for a vector, of whatever length it is there."""

    lanes: int  # bytes of a vector
    panel: int  # vectors of rows that go through the products together

    # Tile route. Shares of the peak: of what is missing, loads that miss L1 and results that are stored take most.
    share: float  # of the multiply-add peak, both products
    single: float  # the same where a panel is only one vector: each number of K and V is loaded for one multiply-add
    softmax: float  # maximum, exponential, sum (AVX-512 11 instructions, else 14): of a vector of scores
    pack: float  # scaling and transposing Q: of a vector of it
    store: float  # dividing, transposing and storing: of a vector of the result
    widen: float  # 16-bit K and V made f32, once for each task: of a vector of them
    copy: float  # the same for strides that would crowd L1: each line comes from another page

    # Decode route, a vector of K or V against up to four rows: loads and multiply-adds take turns at the same ports.
    dot: float  # a row's multiply-add with a vector of K
    lane_sum: float  # the lanes of a score added up
    add: float  # a row's multiply-add with a vector of V
    load: float  # a vector of K or V
    convert: float  # more, where it is of 16-bit elements
    decode_softmax: float  # rows are short, so latencies show
    row: float  # a vector of a row of Q, brought into order, or of a result, stored

    # Passes over the scores, of a vector of them.
    mask: float  # a boolean mask: bits gathered, tested, blended
    bias: float  # read across, transposed, added
    alibi: float
    softcap: float  # tanh
    key_mask: float
    edge: float  # of tiles that a causal mask's or window's edge crosses
    second: float  # scores kept, exponentials again, weights stored or added up


# Measured in cache on the server core of docs/performance.md, phase by phase in profiles, with AVX-512 and with AVX2.
WIDE = Core(
    lanes=64, panel=3, share=0.86, single=0.75, softmax=8.5, pack=10, store=12, widen=3, copy=12,
    dot=0.5, lane_sum=2.2, add=0.55, load=0.8, convert=0.4, decode_softmax=20, row=13,
    mask=10, bias=12, alibi=7, softcap=16, key_mask=5.5, edge=3, second=33,
)  # fmt: skip
NARROW = Core(
    lanes=32, panel=2, share=0.95, single=0.95, softmax=6.4, pack=6, store=6, widen=2.5, copy=9,
    dot=0.6, lane_sum=1.5, add=0.5, load=0.4, convert=0.2, decode_softmax=14, row=12,
    mask=6.5, bias=8, alibi=6, softcap=12.5, key_mask=5, edge=2.6, second=22,
)  # fmt: skip
CORES = {
    "amx_fp16": WIDE,
    "amx": WIDE,
    "avx512_bf16": WIDE,
    "avx512": WIDE,
    "avx2": NARROW,
    "sse2": NARROW._replace(lanes=16, share=0.8, single=0.8),  # without fused multiply-adds, so more instructions
    "neon": WIDE._replace(lanes=16),  # as many registers
    "neon_bf16": WIDE._replace(lanes=16),
}
GUESSED = ("sse2", "neon", "neon_bf16")  # hardly measured, not at all
# Matrix route: 32 rows and 32 keys at a time. A product of 32 x 32 results takes cycles beside the unit's own rate,
# which is that of products that never end, with operands in L1: tiles of K and V and many panels of Q and results lie
# in L2. And cycles of a vector, for what the unit does not do.
UNIT = 32


class Unit(NamedTuple):
    """A matrix unit, or instructions that multiply as one does."""

    name: str  # of the instruction, where there is no unit
    what: str  # it has multiply-adds of
    whole: tuple[str, ...]  # types that it takes as they are
    results: float  # 32 x 32 of them into the unit, or out of it: multiplications and results wait for each other
    line: float  # each line of 64 bytes between L1 and L2: what they exchange at most
    softmax: dict[str, float]  # also makes each weight what the unit takes; most of it is done beside products
    pack: float  # Q, K, V into the unit's order; mostly waiting for L2
    store: float  # like that of other routes, but the result is in a cache further away
    step: int  # dims are rounded up to so many
    in_place: float  # rows of a KV head up to which K is multiplied where it is


AMX = Unit(
    name="AMX", what="bf16 or f16", whole=("bf16",), results=190, line=1,
    softmax={"bf16": 13, "f16": 13, "f32": 12},  # bf16 as measured with weights in two parts
    pack=8, store=17, step=UNIT, in_place=2 * UNIT,
)  # fmt: skip
UNITS = {
    "amx_fp16": AMX._replace(whole=("bf16", "f16"), softmax=AMX.softmax | {"f16": 22}),  # two instructions convert
    "amx": AMX,
    "avx512_bf16": AMX._replace(
        name="VDPBF16PS", what="bf16", results=50, line=0.3, softmax={"bf16": 7}, pack=5, step=2, in_place=math.inf
    ),
    "neon_bf16": AMX._replace(name="BFMMLA", what="bf16", in_place=0),
}
# Of K and V; products for a score and for a value, to be exact; the same with fast_exp. "whole": the unit has the type.
UNIT_PARTS = {"bf16": (1, 1, 1), "whole": (1, 1, 2), "f16": (2, 4, 3), "f32": (3, 6, 6)}
UNIT_FAST_PARTS = {"bf16": (1, 1, 1), "whole": (1, 1, 1), "f16": (2, 3, 2), "f32": (3, 6, 4)}

# Decode route with the unit's products (plan: unit_steps) and tiles, cycles a key of a head, as measured in L2 with 4
# to 24 rows and heads of 64 to 256: each line of K and V is read and, of V, paired; the second block of rows, from 17
# on, takes K again.
STEP_KEY = 7.0
STEP_LINE = 2.0
STEP_BLOCK = 2.4  # of a line of K, with each block more
STEP_WEIGHT = 0.75  # of a row
STEP_RESULT = 1.1  # of 32 dims, with each block

# And by pairs: `peak` is then the unit's, so products are counted as multiply-adds are. Nothing is widened, but rows of
# V are joined; the sums of four rows and more lie in the lanes of one vector.
PAIR_SUM = 0.6

LINE = 64  # bytes
# Whatever the core, in cycles.
PANEL = 70.0  # of a panel and a tile of keys: loops begin and end, the last keys go one by one
MERGE = 200.0  # of a row of a chunk: its sums, brought to one maximum
TASK = 130.0  # taking one, and its place in memory
CALL = 500.0  # checks, workspace
WAKE = 10_000.0  # the other threads begin and end later: 3 us while they are awake

# Of the shorter of work and reading, the part that does not hide behind the longer. Decode steps ask for lines a tile
# ahead, in time for those from L3 (0.1 to 0.25). Most of what the matrix route waits is in `pack` of Unit.
EXPOSED = {"decode": 0.2, "tile": 0.4, "matrix": 0.2}
# Where more is read than is kept nearby, or rows of K and V lie apart, it is too late: 0.3 to 0.7. The hardware's own
# prefetch follows a row that lies apart to its end only: steps read such rows at 0.5 to 0.85 of the rate.
EXPOSED_FAR = 0.55
FAR = 1e8  # bytes
FAR_LINE = 12.0  # cycles that a thread takes to read a line, where fewer bytes lie as far away: from L3 it is 8 to 10
APART = 1.6  # times as long
# Where the plan has lines asked for in the order of memory (Zen 5), they come in time: 64 MB on one thread 1.0 to 1.5
# times as long as rows without gaps, which wait no longer.
APART_IN_ORDER = 1.3

F64_SOFTMAX = 1.4  # times as long: a polynomial of degree 11 instead of 6
FAST_SOFTMAX = 0.77  # fast_exp: of degree 3, and weights of fewer parts


@dataclass(frozen=True)
class Rates:
    """Of all the threads of a call together, but for the clock, which is of one."""

    arithmetic: float  # FLOP/s on the unit that unit_of names
    clock: float  # Hz
    moved: float  # bytes, as traffic counts them
    read: float  # bytes/s of so many
    level: str  # where they lie


@dataclass(frozen=True)
class Prediction:
    seconds: float
    terms: Mapping[str, float]  # seconds, by phase (those of a profile), "read" and "call"
    limit: str


def by_pairs(planned: Planned) -> bool:
    """Whether a step's products are the unit's in the place of multiply-adds, not with tiles."""
    return bool(planned.plan.get("unit_steps")) and UNITS.get(planned.isa, AMX).step != UNIT  # older records have none


def unit_of(planned: Planned) -> str:
    """The dtype whose multiply-adds the plan uses: of 16-bit types those of the matrix route, for f32 too, and of steps
    by pairs."""
    if planned.route == "matrix" or by_pairs(planned):
        return "bf16" if planned.dtype == "f32" else planned.dtype
    return "f64" if planned.dtype == "f64" else "f32"


class Shape:
    """What a plan works on, in the units of the table."""

    def __init__(self, planned: Planned) -> None:
        p, plan = planned.problem, planned.plan
        self.core = CORES.get(planned.isa, NARROW)
        self.real = 8 if planned.dtype == "f64" else 4
        self.item = {"f64": 8, "f32": 4}.get(planned.dtype, 2)
        self.lanes = self.core.lanes // self.real
        kv_heads = p.kv_heads or p.heads
        self.d, self.v = p.head_dim, p.v_dim or p.head_dim
        self.heads = p.batch * kv_heads  # each with its own keys
        self.group = p.heads // kv_heads
        self.rows = self.group * p.q_len  # of such a head
        self.keys = p.kv_len
        self.fast = bool(p.flags & _abi.FLAG_FAST_EXP) and not plan["second_pass"]
        self.chunks = plan["chunks"]
        self.apart = p.k_strides[2] > self.d  # as heads lie in [batch, length, heads, head_dim]
        pairs = plan["flops"] / (2 * (self.d + self.v))
        self.seen = pairs / max(self.heads * self.rows, 1)  # keys of a row, in the mean
        window = bool(p.flags & _abi.FLAG_WINDOW)
        self.edges = int(bool(p.causal) or (window and p.window_right >= 0)) + int(window and p.window_left >= 0)
        self.splits = max(plan["tasks"] / max(self.heads * self.chunks, 1), 1)  # a head's rows, in so many tasks

    def row_vectors(self, dim: int) -> float:
        """Vectors of all rows of `dim` numbers. Chunks pack and store each for itself."""
        return self.heads * self.chunks * self.rows * dim / self.lanes

    def of_rows(self, rows: int) -> Shape:
        """The same with so many rows of each head."""
        part = copy.copy(self)
        part.rows = rows
        return part

    def reached(self, rows: float) -> float:
        """Keys that so many neighbouring rows see together."""
        return min(self.seen + self.edges * (rows / self.group - 1) / 2, self.keys)

    @property
    def read_again(self) -> float:
        """How often a key is brought in, in the mean: once for each task whose rows see it."""
        return self.splits * self.reached(self.rows / self.splits) / max(self.keys, 1)


def traffic(planned: Planned, l2_bytes: int) -> float:
    """Bytes that a call moves. K and V of a head come again for each task, where L2 does not keep them."""
    p, shape = planned.problem, Shape(planned)
    kv = shape.keys * (shape.d + shape.v) * shape.item
    again = shape.read_again if kv > l2_bytes / 2 else min(shape.read_again, 1)
    rows = shape.heads * shape.rows
    # A line of the result is read before it is written.
    total = shape.heads * kv * again + rows * (shape.d + 2 * shape.v) * shape.item
    if shape.chunks > 1:  # so are those of chunks, and read once more to be merged
        total += 3 * rows * shape.chunks * shape.v * shape.real
    pairs = rows * shape.keys
    if p.inputs & _abi.INPUT_MASK:
        total += pairs
    if p.inputs & _abi.INPUT_BIAS:
        total += pairs * {0: 4, 1: 8}.get(p.bias_dtype, 2)
    if p.outputs & (_abi.OUTPUT_WEIGHTS | _abi.OUTPUT_SCORES):
        total += 2 * pairs * shape.real
    if p.outputs & _abi.OUTPUT_MEAN_WEIGHTS:
        total += 2 * pairs * shape.real / max(p.heads, 1)
    return float(total)


def predict(planned: Planned, rates: Rates) -> Prediction:
    shape = Shape(planned)
    peak = 2 * shape.lanes * rates.clock * planned.threads / rates.arithmetic  # cycles of a vector of multiply-adds
    by_tiles = planned.plan.get("unit_steps") and not by_pairs(planned)
    route = {"decode": _unit_steps if by_tiles else _decode, "matrix": _matrix}.get(planned.route, _tile)
    last = planned.plan["last_rows"]
    cycles = route(planned, shape.of_rows(shape.rows - last), peak)
    if last > 0:
        # In one task of each head, with the multiply-adds of vectors (by pairs taken as if with them); K and V in 16
        # bits are read where they lie.
        fma = 0.5 if planned.route == "matrix" else peak
        apart = any(strides[3] not in (0, 1) for strides in (planned.problem.k_strides, planned.problem.v_strides))
        step = _decode(planned, shape.of_rows(last), fma, tasks=shape.heads * shape.chunks, copies=apart)
        for phase in step.keys() - {"task"}:
            cycles[phase] = cycles.get(phase, 0) + step[phase]
    cycles["weights"] = _second_pass(planned, shape, peak)
    if shape.chunks > 1:
        cycles["merge"] = shape.heads * shape.rows * shape.chunks * MERGE
    # The busiest thread decides.
    each = planned.plan["balance"] / planned.threads / rates.clock
    terms = {phase: count * each for phase, count in cycles.items() if count}
    work = sum(terms.values())
    in_order = bool(planned.plan.get("asks_in_order"))  # older records have none
    reading = rates.moved / rates.read * ((APART_IN_ORDER if in_order else APART) if shape.apart else 1)
    terms["call"] = (CALL + (WAKE if planned.threads > 1 else 0)) / rates.clock
    terms["read"] = reading
    line = LINE * rates.clock * planned.threads / rates.read
    late = not in_order and (shape.apart or rates.moved > FAR or line > FAR_LINE)
    exposed = EXPOSED_FAR if late else EXPOSED[planned.route]
    seconds = max(work, reading) + exposed * min(work, reading) + terms["call"]
    return Prediction(seconds, terms, _limit(terms, rates.level))


def _limit(terms: Mapping[str, float], level: str) -> str:
    kinds = {
        "arithmetic": terms.get("scores", 0) + terms.get("values", 0),
        "softmax": terms.get("softmax", 0),
        "masks": terms.get("mask", 0),
        "weights": terms.get("weights", 0),
        f"read {level}": terms["read"],
        "overhead": sum(terms.get(phase, 0) for phase in ("pack", "store", "merge", "task", "call")),
    }
    return max(kinds, key=lambda kind: kinds[kind])


def _second_pass(planned: Planned, shape: Shape, peak: float) -> float:
    outputs = planned.problem.outputs
    vectors = shape.heads * shape.rows * _blocks(shape.keys, shape.lanes)
    kept = outputs & (_abi.OUTPUT_WEIGHTS | _abi.OUTPUT_MEAN_WEIGHTS | _abi.OUTPUT_COLUMN_SUMS)
    cycles = vectors * shape.core.second if kept else 0.0
    if outputs & _abi.OUTPUT_SCORES:  # computed again, by multiply-adds
        cycles += vectors * (shape.d * peak / shape.core.share + shape.core.edge)
    return cycles


def _tile(planned: Planned, shape: Shape, peak: float) -> dict[str, float]:
    core = shape.core
    width = core.panel * shape.lanes
    panels = shape.heads * _blocks(shape.rows, width)
    vectors = shape.heads * _blocks(shape.rows, shape.lanes)  # of rows; the last one may be part empty
    # Each vector of rows stops at its own last key in the products, a panel at that of all its rows in the softmax.
    scores = vectors * shape.reached(shape.lanes)
    weighed = vectors * shape.reached(min(width, shape.rows))
    tiles = panels * max(shape.reached(width) / planned.plan["block_kv"], 1)
    fewer = (core.panel - min(_blocks(shape.rows, shape.lanes), core.panel)) / (core.panel - 1)
    product = scores * peak / (core.share + (core.single - core.share) * fewer)
    widened = core.widen if shape.item == 2 else core.copy if planned.plan["copies_kv"] else 0.0
    brought = shape.heads * shape.keys * (shape.d + shape.v) / shape.lanes * shape.read_again
    softmax = core.softmax * (F64_SOFTMAX if shape.real == 8 else FAST_SOFTMAX if shape.fast else 1)
    found = {
        "scores": product * shape.d + tiles * PANEL,
        "values": product * shape.v + tiles * PANEL,
        "softmax": weighed * softmax + tiles * PANEL,
        "mask": _masks(planned, shape, weighed, width),
        "pack": vectors * shape.d * core.pack * shape.chunks + brought * widened,
        "store": shape.row_vectors(shape.v) * core.store,
        "task": planned.plan["tasks"] * TASK,
    }
    return found


def _matrix(planned: Planned, shape: Shape, peak: float) -> dict[str, float]:
    panels = shape.heads * _blocks(shape.rows, UNIT)
    vectors = panels * UNIT / shape.lanes
    key_blocks = _blocks(shape.reached(UNIT), UNIT)  # of a panel
    weighed = vectors * key_blocks * UNIT
    tiles = max(shape.reached(UNIT) / planned.plan["block_kv"], 1)
    unit = UNITS[planned.isa]
    d, v = (_blocks(dim, unit.step) * unit.step / UNIT for dim in (shape.d, shape.v))  # blocks of them
    number = "whole" if planned.dtype != "bf16" and planned.dtype in unit.whole else planned.dtype
    parts, of_score, of_value = (UNIT_FAST_PARTS if shape.fast else UNIT_PARTS)[number]

    def beside(products: float, operands: float, ways: float) -> float:
        """What products take beside multiply-adds: each loads blocks of K or V, its results go in or out so often."""
        lines = operands * parts * UNIT * UNIT * 2 / LINE + ways * UNIT * UNIT * 4 / LINE
        return panels * products * (ways * unit.results + lines * unit.line)

    in_place = planned.dtype == "bf16" and shape.rows <= unit.in_place and shape.d % unit.step == 0
    copied = v if in_place else d + v
    brought = shape.heads * shape.keys * copied * UNIT * shape.read_again / shape.lanes
    return {
        "scores": weighed * d * UNIT * peak * of_score + beside(key_blocks, d, 1),
        # Results go out of the unit for each tile of keys, and but for the first one into it.
        "values": weighed * v * UNIT * peak * of_value + beside(tiles * v, key_blocks / tiles, 2 - 1 / tiles),
        "softmax": weighed * unit.softmax[planned.dtype] * (FAST_SOFTMAX if shape.fast else 1),
        "mask": _masks(planned, shape, weighed, UNIT),
        "pack": (brought + vectors * d * UNIT * shape.chunks) * unit.pack * parts,
        "store": shape.row_vectors(shape.v) * unit.store,
        "task": planned.plan["tasks"] * TASK,
    }


def _decode(
    planned: Planned, shape: Shape, peak: float, tasks: int | None = None, copies: bool | None = None
) -> dict[str, float]:
    tasks = planned.plan["tasks"] if tasks is None else tasks
    copies = planned.plan["copies_kv"] if copies is None else copies
    core, rows = shape.core, shape.rows
    keys = shape.heads * shape.reached(rows)
    pairs = by_pairs(planned)
    wide = 2 if pairs else 1  # dims that are not whole pairs of vectors count as such
    k, v = (keys * wide * _blocks(dim, wide * shape.lanes) for dim in (shape.d, shape.v))
    load = core.load + (core.convert if shape.item == 2 and not pairs else 0)
    lane_sum = PAIR_SUM if pairs and rows >= 4 else core.lane_sum
    # Four rows at a time, then two, then one: each pass reads the keys of a tile again, from L1.
    loads = (rows // 4 + (rows % 4).bit_count()) * load
    copied = (k + v) * core.copy if copies else 0.0
    weighed = keys * rows / shape.lanes
    at_once = 2 * peak  # where a core does one multiply-add a cycle instead of two
    return {
        "scores": k * (rows * core.dot * at_once + loads) + keys * rows * lane_sum,
        "values": v * (rows * core.add * at_once + loads),
        "softmax": weighed * core.decode_softmax * (F64_SOFTMAX if shape.real == 8 else 1),
        "mask": _masks(planned, shape, weighed, rows),
        "pack": shape.row_vectors(shape.d) * core.row + copied,
        "store": shape.row_vectors(shape.v) * core.row,
        "task": tasks * TASK,
    }


def _unit_steps(planned: Planned, shape: Shape, peak: float) -> dict[str, float]:
    core, rows = shape.core, shape.rows
    keys = shape.heads * shape.reached(rows)
    k, v = (dim * shape.item / LINE for dim in (shape.d, shape.v))  # lines of a key
    blocks = _blocks(rows, 16)
    weights = 2 if planned.dtype == "f16" else 1  # parts, each multiplied with V: unmeasured
    return {
        "scores": keys * (STEP_KEY + STEP_LINE * (k + v) + STEP_BLOCK * k * (blocks - 1)),
        "values": keys * (2 + STEP_RESULT * v * blocks * weights),
        "softmax": keys * (2 + STEP_WEIGHT * rows),
        "mask": _masks(planned, shape, keys * rows / shape.lanes, rows),
        "pack": shape.row_vectors(shape.d) * core.row,
        "store": shape.row_vectors(shape.v) * core.row,
        "task": planned.plan["tasks"] * TASK,
    }


def _masks(planned: Planned, shape: Shape, vectors: float, width: int) -> float:
    """Passes over `vectors` of scores, `width` rows at a time."""
    p, core = planned.problem, shape.core
    each = 0.0
    if p.inputs & _abi.INPUT_MASK:
        each += core.mask
    elif p.inputs & _abi.INPUT_KEY_MASK:
        each += core.key_mask
    if p.inputs & _abi.INPUT_BIAS:
        each += core.bias
    if p.inputs & _abi.INPUT_ALIBI:
        each += core.alibi
    if p.softcap > 0:
        each += core.softcap
    crossed = 0.0
    if shape.edges and not p.inputs & (_abi.INPUT_MASK | _abi.INPUT_KEY_MASK):
        # Where an edge lies in a panel, it crosses so many keys, in whole tiles.
        keys = min(shape.edges * (width / shape.group + planned.plan["block_kv"]), shape.reached(width))
        crossed = shape.heads * shape.rows / shape.lanes * keys
    return vectors * each + crossed * core.edge


def _blocks(number: float, size: float) -> int:
    return int(-(-number // size))
