"""The ctypes mirror says what manyhead.h says: names and order by reading the header, sizes by asking a C compiler."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from manyhead import _abi

HEADER = Path(__file__).parents[2] / "include" / "manyhead" / "manyhead.h"
TEXT = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)
COMPILER = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)


def fields(struct):
    body = re.search(rf"typedef struct {struct} {{(.*?)}} {struct};", TEXT, re.DOTALL).group(1)
    return [re.search(r"(\w+)(\[\w+\])?$", line.strip()).group(1) for line in body.split(";") if line.strip()]


@pytest.mark.parametrize("struct", _abi.STRUCTS)
def test_fields_are_those_of_the_header(struct):
    assert [name for name, *_ in _abi.STRUCTS[struct]._fields_] == fields(struct)


def test_every_struct_and_function_is_mirrored():
    structs = set(re.findall(r"typedef struct (\w+) {", TEXT))
    assert structs == _abi.STRUCTS.keys()
    functions = re.findall(r"MH_API [\w\s*]+?\b(mh_\w+)\((.*?)\);", TEXT, re.DOTALL)
    assert {name for name, _ in functions} == _abi.FUNCTIONS.keys()
    for name, arguments in functions:
        count = 0 if arguments.strip() == "void" else len(arguments.split(","))
        assert len(_abi.FUNCTIONS[name][1]) == count, name


def constants():
    """C name -> value here, for every enumerator and flag of the header."""
    names = re.findall(r"\b(MH_[A-Z0-9_]+) = \d+", TEXT) + re.findall(r"#define (MH_(?:FLAG|INPUT|OUTPUT)_\w+) ", TEXT)
    renamed = {"MH_LSE_BASE2": "LSE_BASE2"}
    layouts = ("MH_WEIGHTS_", "MH_DTYPE_")  # weights go by strides, types by name: neither number is used
    return {
        name: getattr(_abi, renamed.get(name, name.removeprefix("MH_")))
        for name in names
        if not name.startswith(layouts)
    }


def test_constants_are_those_of_the_header():
    values = dict(re.findall(r"\b(MH_[A-Z0-9_]+) = (\d+)", TEXT))
    values |= dict(re.findall(r"#define (MH_(?:FLAG|INPUT|OUTPUT)_\w+) (\d+)u", TEXT))
    assert len(constants()) >= 35
    assert constants() == {name: int(values[name]) for name in constants()}


@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
def test_sizes_and_offsets(tmp_path):
    lines = []
    for struct, mirror in _abi.STRUCTS.items():
        lines.append(f'printf("{struct} %zu\\n", sizeof({struct}));')
        lines += [f'printf("{struct}.{f} %zu\\n", offsetof({struct}, {f}));' for f, *_ in mirror._fields_]
    source = tmp_path / "sizes.c"
    body = "\n".join(lines)
    source.write_text(f'#include "manyhead/manyhead.h"\n#include <stdio.h>\nint main(void) {{\n{body}\nreturn 0;\n}}\n')
    program = tmp_path / "sizes"
    subprocess.run([COMPILER, "-std=c99", f"-I{HEADER.parents[1]}", source, "-o", program], check=True)
    output = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    expected = dict(line.split() for line in output.splitlines())
    for struct, mirror in _abi.STRUCTS.items():
        assert ctypes.sizeof(mirror) == int(expected[struct]), struct
        for field, *_ in mirror._fields_:
            assert getattr(mirror, field).offset == int(expected[f"{struct}.{field}"]), f"{struct}.{field}"
