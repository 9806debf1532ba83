"""Rules about the build that no compiler checks. Run by `meson test --suite build`; each prints what is wrong.

symbols LIBRARY LIST    the shared library exports exactly the names in LIST
objects ARCHIVE...      an archive of one ISA has one global symbol, nothing the linker could share with code for
                        another CPU, and nothing that runs before main
loops ARCHIVE...        the innermost loops of the products keep their sums in registers and are as wide as designed;
                        arithmetic makes no calls; needs objdump, and ends with 77 ("skipped") without it
instructions PROGRAM    a long call and a small one of PROGRAM (tests/one_call.c) on AVX2 take no more instructions
                        than said here; needs valgrind, and ends with 77 without it
layers ROOT             who may include what (src/README.md), and READMEs name only files that exist
"""

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

XSIMD = r"xsimd/|\w*intrin\.h|arm_(neon|sve)\.h"
# What an include line may not name, except in the listed files. Paths are relative to the root.
RESERVED = [
    ("oneTBB", r"(oneapi/)?tbb/", r"src/pool\.cpp|tests/.*|bench/.*"),
    ("CBLAS", r"cblas|openblas", r"tests/.*|bench/.*"),
    ("xsimd and intrinsics", XSIMD, r"src/kernels/.*|tests/micro_test\.cpp"),
    ("CPU detection", r"cpuid\.h|sys/auxv\.h|asm/hwcap\.h", r"src/machine\.cpp|tests/skip_absent_isa\.cpp"),
]
SOURCES = ["include", "src", "capi", "tests", "bench"]
SUFFIXES = {".h", ".hpp", ".c", ".cpp", ".inc", ".in"}


def lines_of(command: list[str]) -> list[str]:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def check_symbols(nm: str, library: str, listing: str) -> list[str]:
    """Both directions: a name that leaks is a promise nobody meant, one that is missing breaks programs."""
    rows = (line.split() for line in lines_of([nm, "-D", "--defined-only", library]))
    exported = {row[-1].split("@")[0] for row in rows if len(row) == 3 and row[1] != "A"}
    text = Path(listing).read_text()
    wanted = {line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")}
    return [f"exported, but not in {Path(listing).name}: {name}" for name in sorted(exported - wanted)] + [
        f"in {Path(listing).name}, but not exported: {name}" for name in sorted(wanted - exported)
    ]


def check_objects(nm: str, archive: str) -> list[str]:
    name = Path(archive).name
    isa = name.removeprefix("libmh_").removesuffix(".a")
    ours = f"manyhead::{isa}::kernels()"
    wrong, found = [], []
    for line in lines_of([nm, "-C", "--defined-only", archive]):
        match = re.fullmatch(r"[0-9a-f]+ (\w) (.+)", line)
        if not match:
            continue
        kind, symbol = match.groups()
        if kind in "TDBRG":
            found.append(symbol)
        # Weak and unique symbols are merged across objects by name: only names with the ISA in them are safe.
        elif kind in "WVu" and f"xsimd_{isa}" not in symbol and f"manyhead::{isa}::" not in symbol:
            wrong.append(f"{name}: weak symbol without the ISA's name: {symbol}")
        if symbol.startswith(("_GLOBAL__sub_I", "__cxx_global_var_init")):
            wrong.append(f"{name}: code that runs before main: {symbol}")
    if found != [ours]:
        wrong.append(f"{name}: its one global symbol must be {ours}, it has {found}")
    return wrong


# Rows of a tile of the products (tile_rows in src/kernels/product.hpp) by vectors of a panel. The product of both is
# the number of FMAs in the loop over the depth, which is a multiple of it where the compiler unrolled the loop.
TILE_ROWS = {"avx512": {3: 8, 2: 12, 1: 16}, "avx2": {2: 6, 1: 8}}
TILE_ROWS["neon"] = TILE_ROWS["avx512"]
WITHOUT_LOOPS = ("sse2", "amx", "amx_fp16")  # that has no FMAs, and these multiply tiles
# Instructions of the unit in the innermost loops of its products (src/kernels/matrix_unit.hpp): BFMMLA for 8 x 8
# results, VDPBF16PS for 1 to 12 rows of two vectors and 1 to 16 of one, and one that adds up a pair of weights
# (plus_pair, src/kernels/unit_number.hpp); and of steps by pairs (score_pairs, src/kernels/decode_scores.hpp,
# 8 keys and 4 of 1 to 8 rows; add_values, src/kernels/decode_values.hpp, 1 to 4 rows of 1 to 4 pairs of vectors).
UNIT_INSTRUCTIONS = ("bfmmla", "vdpbf16ps")
UNIT_LOOPS = {
    "products": {"neon_bf16": {16}, "avx512_bf16": {1, *range(2, 25, 2)}},
    "products of half the columns": {"avx512_bf16": {*range(1, 17)}},
    "products by pairs": {"avx512_bf16": {2, 4, 6, 8, 12, 16, 32, 64}},
}
HALF = re.compile(r"\brows<\d+, .*, 1>\(")
SUMS = "vaddvq"  # of a vector's lanes: once a row
ADD_SIGNED = "3"  # the mode of the rare second try of a panel: its masks do not all fit into registers, and need not
JUMP = re.compile(r"j\w+|b(\.\w+)?|cbn?z|tbn?z")
VECTOR = re.compile(r"[xyz]mm\d|\b[vq]\d")  # not d8 to d15, which AArch64 functions save and restore
PRODUCT = re.compile(r"product<.*?product_mode\)(\d), (\d+), (float|double)")
REST = re.compile(r"product_rest<.*?product_mode\)\d, \d+, (\d+), (float|double)")  # tiles of any number of rows
ROW_VALUES = re.compile(r"\brow_values<(float|double)")  # src/kernels/row_values.hpp: 8 rows of 3 vectors and fewer
ROW_VALUES_FMAS = {"avx512": 24}


class Instruction(NamedTuple):
    address: int
    name: str
    operands: str

    @property
    def jumps_to(self) -> int | None:
        # x86: jne 1f0 <...>; AArch64: b.ne 1f0 <...>, cbnz x0, 1f0 <...>
        match = re.search(r"\b([0-9a-f]+) <", self.operands) if JUMP.fullmatch(self.name) else None
        return int(match[1], 16) if match else None

    @property
    def is_fma(self) -> bool:
        return self.name.startswith("vfmadd") or self.name == "fmla"

    def spills(self, frame: str) -> bool:
        return bool(VECTOR.search(self.operands) and re.search(rf"[(\[]({frame})\b", self.operands))


def functions_of(objdump: str, archive: str) -> dict[str, list[Instruction]]:
    functions: dict[str, list[Instruction]] = {}
    body: list[Instruction] = []
    for line in lines_of([objdump, "-drC", "--no-show-raw-insn", archive]):
        if match := re.fullmatch(r"[0-9a-f]+ <(.*)>:", line):
            body = functions.setdefault(match[1], [])
        elif match := re.match(r"\s*([0-9a-f]+):\s+(\S+)\s*(.*)", line):
            body.append(Instruction(int(match[1], 16), match[2], match[3]))
    return functions


def innermost_loops(body: list[Instruction]) -> list[list[Instruction]]:
    """What lies between the target of a jump backwards and the jump, with no other such loop inside. What is rare lies
    behind the function's end and jumps back, always: that is none."""
    ends = [i.address for i in body if i.name == "ret"]
    backwards = [i for i in body if i.jumps_to is not None and i.jumps_to <= i.address]
    spans = [
        (i.jumps_to, i.address)
        for i in backwards
        if i.name not in ("jmp", "b") or not any(i.jumps_to < end < i.address for end in ends)
    ]
    inner = [(a, b) for a, b in spans if not any((c, d) != (a, b) and a <= c and d <= b for c, d in spans)]
    return [[i for i in body if a <= i.address <= b] for a, b in inner]


def frame_of(body: list[Instruction]) -> str:
    """The registers that point to the stack. Some compilers use rbp and x29 as any others where they do not."""
    if any(i.name == "mov" and i.operands in ("%rsp,%rbp", "x29, sp") for i in body):
        return "%r[sb]p|sp|x29"
    return "%rsp|sp"


def kind_of(name: str) -> str:
    """Which of UNIT_LOOPS a function's are."""
    if "in_pairs" in name:
        return "products by pairs"
    return "products of half the columns" if HALF.search(name) else "products"


def check_unit_loops(isa: str, functions: dict[str, list[Instruction]]) -> list[str]:
    wrong: list[str] = []
    seen: dict[str, set[int]] = {what: set() for what in UNIT_LOOPS}
    for name, body in functions.items():
        for loop in innermost_loops(body):
            count = sum(i.name in UNIT_INSTRUCTIONS for i in loop)
            turns = any(i.name == "call" and i.operands.startswith("*") for i in loop)  # a product each, and weights
            if count == 0 or turns:
                continue
            seen[kind_of(name)].add(count)
            frame = frame_of(body)
            wrong += [f"{isa}: a vector on the stack in {name}: {i.operands}" for i in loop if i.spills(frame)]
    for what, by_isa in UNIT_LOOPS.items():
        designed = by_isa.get(isa, set())
        if seen[what] != designed:
            wrong.append(f"{isa}: innermost loops of {sorted(seen[what])} {what}, must be {sorted(designed)}")
    return wrong


def check_calls(isa: str, functions: dict[str, list[Instruction]]) -> list[str]:
    """Arithmetic of vectors that the compiler left as calls (src/kernels/neon_direct.hpp)."""
    wrong = set()
    for name, body in functions.items():
        product = PRODUCT.search(name)
        if product is None or product[1] != ADD_SIGNED:
            wrong |= {i.operands for i in body if i.name == "R_AARCH64_CALL26" and "kernel::wrap::" in i.operands}
    return [f"{isa}: calls {name}" for name in sorted(wrong) if not name.split("::")[-1].startswith(SUMS)]


def check_loops(objdump: str, archive: str) -> list[str]:
    isa = Path(archive).name.removeprefix("libmh_").removesuffix(".a")
    if isa in WITHOUT_LOOPS:
        return []
    functions = functions_of(objdump, archive)
    wrong, seen = check_unit_loops(isa, functions) + check_calls(isa, functions), set()
    values: set[str] = set()
    if isa in UNIT_LOOPS["products"]:  # its matrix unit alone
        return wrong
    if isa not in TILE_ROWS:
        return [*wrong, f"{isa}: no widths are designed; it wants a row in TILE_ROWS in {Path(__file__).name}"]
    for name, body in functions.items():
        if match := REST.search(name) or ROW_VALUES.search(name):
            loops = [loop for loop in innermost_loops(body) if any(i.is_fma for i in loop)]
            spills = [i for loop in loops for i in loop if i.spills(frame_of(body))]
            wrong += [f"{isa}: a vector on the stack in {match[0]}: {i.name} {i.operands}" for i in spills]
        if match := ROW_VALUES.search(name):
            most = max((sum(i.is_fma for i in loop) for loop in loops), default=0)
            if most == 0 or most % ROW_VALUES_FMAS[isa]:
                wrong.append(f"{isa}: the largest loop of {match[0]} has {most} FMAs, must be a multiple of 24")
            values.add(match[1])
        match = PRODUCT.search(name)
        if not match:
            continue
        what = f"{isa}: product of mode {match[1]}, {match[2]} vectors of {match[3]}"
        vectors = int(match[2])
        loops = [loop for loop in innermost_loops(body) if any(i.is_fma for i in loop)]
        counts = sorted(sum(i.is_fma for i in loop) for loop in loops)
        designed = TILE_ROWS[isa].get(vectors, 0) * vectors
        seen.add((vectors, match[3]))
        if designed == 0:
            wrong.append(f"{what}: no such width is designed; has TILE_ROWS in {Path(__file__).name} to be changed?")
        elif not counts or counts[-1] % designed:
            wrong.append(f"{what}: the FMAs of its loops are {counts}, the largest must be a multiple of {designed}")
        frame = frame_of(body)
        spills = [i for loop in loops for i in loop if i.spills(frame) and match[1] != ADD_SIGNED]
        wrong += [f"{what}: a vector on the stack in a loop: {i.name} {i.operands}" for i in spills]
    if isa in ROW_VALUES_FMAS and values != {"float", "double"}:
        wrong.append(f"{isa}: row_values of {sorted(values)} alone")
    for vectors in TILE_ROWS[isa]:
        wrong += [
            f"{isa}: no product of {vectors} vectors of {real}"
            for real in ("float", "double")
            if (vectors, real) not in seen
        ]
    return wrong


# Of one_call.c with 384 queries and keys, for each FMA instruction that its two products need: 2.14 with g++ 12.
MOST_INSTRUCTIONS = 2.45
# With one query and key, a call after the first: 3265 with g++ 12. How memory is copied, the C library
# chooses.
MOST_OF_SMALL_CALL = 3750


def count_instructions(valgrind: str, program: str, length: int, calls: int) -> int:
    command = [valgrind, "--tool=callgrind", "--toggle-collect=mh_plan_run", "--callgrind-out-file=/dev/null"]
    run = subprocess.run(
        [*command, program, str(length), str(calls)],
        capture_output=True,
        text=True,
        env={"MH_ISA": "avx2", "MH_THREADS": "1"},
    )
    match = re.search(r"Collected : (\d+)", run.stderr)
    if run.returncode != 0 or not match:
        raise SystemExit(f"valgrind ended with {run.returncode}: {run.stderr.strip()}")
    return int(match[1])


def check_instructions(valgrind: str, program: str) -> list[str]:
    fmas = 2 * 2 * 384 * 384 * 64 / 8  # products x heads x queries x keys x head_dim / lanes of AVX2
    each = count_instructions(valgrind, program, 384, 1) / fmas
    few, many = (count_instructions(valgrind, program, 1, calls) for calls in (10, 110))
    small = (many - few) / 100
    print(f"instructions: {each:.3f} for an FMA, {small:.0f} for a call of one query and key")
    wrong = [f"more than {MOST_INSTRUCTIONS} instructions for an FMA"] if not 1 < each <= MOST_INSTRUCTIONS else []
    if not 1 < small <= MOST_OF_SMALL_CALL:
        wrong += [f"more than {MOST_OF_SMALL_CALL} instructions for a call of one query and key"]
    return wrong


def include_lines(root: Path) -> list[tuple[str, str]]:
    """(file, included name) of every C and C++ file."""
    found = []
    for top in SOURCES:
        for path in sorted((root / top).rglob("*")):
            if path.suffix in SUFFIXES:
                names = re.findall(r'^\s*#\s*include\s*[<"]([^">]+)[">]', path.read_text(), re.M)
                found += [(path.relative_to(root).as_posix(), name) for name in names]
    return found


def check_reserved(file: str, name: str) -> list[str]:
    return [
        f"{file}: includes {name}; {what} may be used only in {where}"
        for what, pattern, where in RESERVED
        if re.match(pattern, name) and not re.fullmatch(where, file)
    ]


def check_direction(root: Path, file: str, name: str) -> list[str]:
    """The arrows: capi -> src -> src/kernels/kernel_api.hpp; the kernels see only themselves and the seam."""
    wrong = []
    ours = name.startswith(("manyhead/", "kernels/", "capi/", "tests/")) or (root / "src" / name).is_file()
    if file.startswith("src/kernels/"):
        sibling = (root / "src" / "kernels" / name).is_file()
        seam = file.endswith("/kernel_api.hpp") and name == "manyhead/manyhead.h"
        if ours and not sibling and not seam:
            wrong.append(f"{file}: includes {name}; kernels may include kernel_api.hpp and their own headers only")
        if file.endswith("/kernel_api.hpp") and not seam and not name.startswith("std"):
            wrong.append(f"{file}: includes {name}; the seam is plain data")
    elif file.startswith(("src/", "capi/")):
        below = re.fullmatch(r"kernels/(kernel_api\.hpp|positions\.hpp|ticks\.hpp|instances\.inc|isa_list\.inc)", name)
        if name.startswith("kernels/") and not below:
            wrong.append(f"{file}: includes {name}; only the seam of src/kernels may be seen from outside")
    elif file == "include/manyhead/manyhead.h" and name not in ("stddef.h", "stdint.h"):
        wrong.append(f"{file}: includes {name}; the C header includes <stddef.h> and <stdint.h> only")
    elif file == "tests/api_test.c" and ours and name != "manyhead/manyhead.h":
        wrong.append(f"{file}: includes {name}; it is a user's program")
    return wrong


def check_readme(root: Path, readme: Path) -> list[str]:
    """Words that look like a path of ours must exist, from the root or the README's folder; names of files anywhere."""
    wrong = []
    tops = {path.name for path in root.iterdir()} - {"build"}
    ours = {path.name for top in [*SOURCES, "python"] for path in (root / top).rglob("*")}
    for word in re.findall(r"(?<![\w./<-])[\w./-]*\w", readme.read_text()):
        looks_like_path = word.split("/")[0] in tops if "/" in word else Path(word).suffix in SUFFIXES | {".py"}
        exists = any((folder / word).exists() for folder in (root, readme.parent)) or word in ours
        if looks_like_path and not exists:
            wrong.append(f"{readme.relative_to(root)}: names {word}, which does not exist")
    return wrong


def check_layers(root: Path) -> list[str]:
    wrong = []
    for file, name in include_lines(root):
        wrong += check_reserved(file, name) + check_direction(root, file, name)
    readmes = [root / "CONTRIBUTING.md", *root.glob("README.md")]
    for top in [*SOURCES, "python"]:
        readmes += (root / top).rglob("README.md")
    for readme in readmes:
        if readme.is_file():
            wrong += check_readme(root, readme)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rule", choices=["symbols", "objects", "loops", "instructions", "layers"])
    parser.add_argument("--nm", default="nm")
    parser.add_argument("--objdump", default="objdump")
    parser.add_argument("--valgrind", default="valgrind")
    parser.add_argument("what", nargs="+")
    args = parser.parse_args()
    if args.rule == "symbols":
        wrong = check_symbols(args.nm, *args.what)
    elif args.rule == "objects":
        wrong = [text for archive in args.what for text in check_objects(args.nm, archive)]
    elif args.rule == "loops":
        if not shutil.which(args.objdump):
            print("loops: skipped, there is no objdump (package binutils)")
            return 77
        wrong = [text for archive in args.what for text in check_loops(args.objdump, archive)]
    elif args.rule == "instructions":
        if not shutil.which(args.valgrind):
            print("instructions: skipped, there is no valgrind")
            return 77
        wrong = check_instructions(args.valgrind, args.what[0])
    else:
        wrong = check_layers(Path(args.what[0]))
    print("\n".join(wrong) or f"{args.rule}: all rules hold")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
