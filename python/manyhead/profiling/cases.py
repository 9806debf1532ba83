"""Which problems a profile measures, and how: by preset, by line, by model; then times dtypes, ISAs and threads."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from .._user import UserError, one_of
from ..report.units import plural
from .instruments import Instruments

ITEM_SIZE = {"f32": 4, "bf16": 2, "f16": 2, "f64": 8}
DEFAULT = ("table", "sequence", "threads")

# As include/manyhead/manyhead.h has them, from the first dimension to `strided`; a test compares.
LINES = """\
A problem line has a dtype (f32 f64 bf16 f16), then in any order
  b<batch> h<heads>[/<kv_heads>] q<q_len> kv<kv_len> d<head_dim> [v<v_dim>]
  [causal] [align=tl|br|off:<n>] [window=<left>,<right>] [softcap=<x>]
  [scale=<x>] [alibi|alibi=signed] [slopes=bh]
  [sinks] [mask] [bias|bias=<dtype>] [keymask] [lens] [offsets]
  [i64]      i64: lens and offsets are int64, else int32
  [fastexp] [lse|lse2] [weights] [meanw] [colsums] [scores=raw|capped|biased]
  [bshd]     q, k, v and out lie as [batch, length, heads, dim], else as
             [batch, heads, length, dim]
  [strided]  they lie in a way that a line cannot say, [extra=<n>] keys that
             the layer added: read as if not there
align, where q_len is not kv_len: query i stands at key i (tl), the last query
at the last key (br), or query i at key i + n (off:<n>).
"""
# What errors of the library are about, in the words of a line.
IN_LINES = {
    "align is None, but": "align is missing:",
    "it must be 'top_left' or 'bottom_right' (or q_offset given)": "it must be align=tl, align=br or align=off:<n>",
}


@dataclass(frozen=True)
class Case:
    """A problem, before it is said in which dtype, on which instruction set and by how many threads."""

    name: str
    problem: str  # a problem line; it may lack its dtype
    what: str
    series: str = "table"
    x: int | None = None  # its place on the axis of the series


@dataclass(frozen=True)
class Row:
    """What is measured: one line of the result."""

    case: Case
    line: str
    dtype: str
    isa: str
    threads: int
    x: int | None
    flops: float  # about: masks other than the causal one are not counted
    size: int  # bytes of its tensors

    def __str__(self) -> str:
        return f"{self.case.name} {self.dtype} {self.isa}, {plural(self.threads, 'thread')}"


def _table() -> list[Case]:
    cases = []
    for line in resources.files("manyhead").joinpath("workloads.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, *numbers, what = line.split(maxsplit=8)
            batch, heads, kv_heads, q_len, kv_len, head_dim, causal = map(int, numbers)
            groups = f"{heads}/{kv_heads}" if kv_heads != heads else heads
            problem = f"b{batch} h{groups} q{q_len} kv{kv_len} d{head_dim}{' causal' if causal else ''}"
            cases.append(Case(name, problem, what))
    return cases


@cache
def presets() -> dict[str, tuple[str, list[Case]]]:
    """Name -> what it is, and its problems."""
    text = resources.files(__package__).joinpath("presets.toml").read_text(encoding="utf-8")
    found = {"table": ("what attention is used for, a line each", _table())}
    for name, preset in tomllib.loads(text).items():
        found[name] = preset["what"], [case for row in preset["rows"] for case in _fill_in(row)]
    return found


def _fill_in(row: dict[str, Any]) -> list[Case]:
    lists = {key: value for key, value in row.items() if isinstance(value, list)}
    if not lists:
        return [Case(**row)]
    texts = {key: value for key, value in row.items() if isinstance(value, str)}
    cases = []
    for values in zip(*lists.values(), strict=True):
        place = dict(zip(lists, values, strict=True))
        filled = {key: text.format(**place) for key, text in texts.items()}
        cases.append(Case(**filled, x=place.get("x")))
    return cases


def preset_cases(names: Iterable[str]) -> list[Case]:
    return [case for name in names for case in presets()[one_of("preset", name, presets())][1]]


def shape_cases(lines: Iterable[str]) -> list[Case]:
    return [Case(" ".join(line.split()), line.strip(), "") for line in lines]


def check_dtype(lines: Iterable[str], dtypes: Sequence[str]) -> None:
    """Whether --dtype, as it was given, leaves lines the dtype that they begin with."""
    for line in lines:
        first = next(iter(line.split()), "")
        if first in ITEM_SIZE and first not in dtypes:
            raise UserError(f"--dtype {','.join(dtypes)}: the line {line!r} says {first}. Leave out one of them.")


def make_rows(
    cases: Sequence[Case], dtypes: Sequence[str], isas: Sequence[str], threads: Sequence[int], tools: Instruments
) -> list[Row]:
    """Each case in each way, those of one way side by side. A case of the series `threads` comes once, on 1, 2, 4 ...
    threads, and a line that names its dtype only in that one."""
    rows = []
    ways = [(dtype, isa, number) for dtype in dtypes for isa in isas for number in threads]
    own = [case for case in cases if case.problem.split()[:1] and case.problem.split()[0] in ITEM_SIZE]
    for dtype, isa, number in ways:
        rows += [
            _row(case, f"{dtype} {case.problem}", dtype, isa, number, case.x, tools)
            for case in cases
            if case.series != "threads" and case not in own
        ]
    for case in own:
        dtype = case.problem.split()[0]
        rows += [_row(case, case.problem, dtype, isa, number, case.x, tools) for isa in isas for number in threads]
    for case in cases:
        if case.series == "threads":
            rows += [
                _row(case, f"{dtype} {case.problem}", dtype, isa, number, number, tools)
                for dtype in dtypes
                for isa in isas
                for number in doublings(max(threads))
            ]
    return rows


def doublings(last: int) -> list[int]:
    """1, 2, 4, ... and the last number."""
    return sorted({1 << power for power in range(last.bit_length())} | {last})


def read_problem(line: str, tools: Instruments, where: str = "", before: int = 0) -> Any:
    """The problem of a line, where a plan can be made of it. `where` tells the user which line it is, which they gave
    without its first letters, so many as `before`."""
    try:
        problem = tools.parse_problem(line)
        tools.check_problem(problem)
    except ValueError as error:
        text = re.sub(r"(?<=\(column )\d+(?=\)$)", lambda column: str(int(column[0]) - before), str(error))
        for name, here in IN_LINES.items():
            text = text.replace(name, here)
        pointed = getattr(error, "pointed", None)  # a line that was read but asks for what cannot be has no column
        shown = pointed() if pointed else line
        raise UserError(where + "\n".join([text, *(part[before:] for part in shown.split("\n"))])) from error
    return problem


def _row(case: Case, line: str, dtype: str, isa: str, threads: int, x: int | None, tools: Instruments) -> Row:
    problem = read_problem(line, tools, before=len(line) - len(case.problem))
    kv_heads = problem.kv_heads or problem.heads
    v_dim = problem.v_dim or problem.head_dim
    q_rows = problem.batch * problem.heads * problem.q_len
    kv_rows = problem.batch * kv_heads * problem.kv_len
    pairs = q_rows * problem.kv_len
    size = (q_rows + kv_rows) * (problem.head_dim + v_dim) * ITEM_SIZE[dtype]
    if problem.inputs or problem.outputs:  # any of them may be as large as the scores
        size += 2 * 4 * pairs
    flops = 2.0 * (problem.head_dim + v_dim) * pairs
    return Row(case, line, dtype, isa, threads, x, flops / 2 if problem.causal else flops, size)
