"""Settings of the process, facts about the machine, `python -m manyhead`, and how the shared library is found."""

from __future__ import annotations

import json
import os
from pathlib import Path

import manyhead
import numpy as np
import pytest
from interpreter import run_python
from manyhead import __main__, _library, _plan, _runtime

PACKAGE = Path(manyhead.__file__).parent


@pytest.fixture
def restored():
    """The tests may run under MH_ISA and MH_THREADS."""
    isa, threads = manyhead.isa(), manyhead.threads()
    yield
    manyhead.set_isa(isa)
    manyhead.set_threads(threads if os.environ.get("MH_THREADS") else 0)


def test_version():
    assert manyhead.version() == manyhead.__version__
    assert manyhead.__version__.count(".") == 2


def test_isas(restored):
    supported = [name for name, runs in manyhead.isas().items() if runs]
    q = np.random.default_rng(0).standard_normal((1, 2, 5, 8)).astype(np.float32)
    results = []
    for name in supported:
        manyhead.set_isa(name)
        assert manyhead.isa() == name and not _plan._plans  # which were made for another one
        assert manyhead.plan(q, q, q).describe(json=True)["isa"] == name
        results.append(manyhead.attention(q, q, q))
    for result in results[1:]:
        np.testing.assert_allclose(result, results[0], 1e-5, 1e-6)
    best = "import manyhead; manyhead.set_isa({!r}); manyhead.set_isa(None); print(manyhead.isa())"
    assert run_python(best.format(supported[-1])).stdout.split() == supported[:1]
    assert run_python("import manyhead; print(manyhead.isa())").stdout.split() == supported[:1]


def test_isa_errors(restored):
    with pytest.raises(ValueError, match="mmx"):
        manyhead.set_isa("mmx")
    with pytest.raises(TypeError, match="name must be a str or None, not int"):
        manyhead.set_isa(3)
    with pytest.raises(ValueError, match=r"there is no instruction set 'sse2\\x00'"):
        manyhead.set_isa("sse2\0")
    for name in (name for name, supported in manyhead.isas().items() if not supported):
        with pytest.raises(manyhead.Error, match=name) as caught:
            manyhead.set_isa(name)
        assert caught.value.status == 2


def test_threads(restored):
    manyhead.set_threads(3)
    assert manyhead.threads() == 3
    for wrong, exception in ((-1, ValueError), (2**40, ValueError), (1.5, TypeError)):
        with pytest.raises(exception, match="threads "):
            manyhead.set_threads(wrong)
    assert manyhead.threads() == 3
    q = np.zeros((1, 64, 64, 64), np.float32)
    for cap in (1, 0):
        manyhead.set_threads(cap)
        with manyhead.profile() as profile:
            manyhead.attention(q, q, q, threads=2)
        assert profile.calls[0]["threads"] == (1 if cap == 1 else min(2, manyhead.threads()))
    code = "import manyhead as m; n = m.threads(); m.set_threads(n + 1); print(n, m.threads() - n); m.set_threads(0)"
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert run_python(code + "; print(m.threads())").stdout.split() == [str(cpus), "1", str(cpus)]


def test_a_cap_for_a_while():
    ask = "from manyhead import _runtime as r; from manyhead._measure import Planned; n = r.threads(); "
    plan = "plan = Planned('f32 b1 h64 q64 kv64 d64', threads=1); assert plan.plan['threads'] == 1; "
    assert run_python(ask + plan + "print(r.threads() == n, r._cap)").stdout.split() == ["True", "0"]
    assert run_python(ask + "r.set_threads(n); " + plan + "print(r._cap == n)").stdout.split() == ["True"]
    assert run_python(ask + plan + "print(r._cap)", MH_THREADS="3").stdout.split() == ["3"]


def test_the_environment():
    assert run_python("import manyhead; print(manyhead.threads())", MH_THREADS="5").stdout == "5\n"
    slowest = [name for name, supported in manyhead.isas().items() if supported][-1]
    assert run_python("import manyhead; print(manyhead.isa())", MH_ISA=slowest).stdout == slowest + "\n"
    call = "import manyhead; q = memoryview(bytes(32)).cast('f', (1, 1, 2, 4)); manyhead.attention(q, q, q)"
    assert run_python(call).returncode == 0
    wrong = run_python(call, MH_ISA="mmx")
    assert wrong.returncode != 0 and "mmx" in wrong.stderr
    wrong = run_python("import sys; from manyhead.__main__ import main; sys.exit(main([]))", MH_ISA="mmx")
    assert wrong.returncode == 2 and "manyhead info: " in wrong.stderr and "Traceback" not in wrong.stderr
    command = "import sys; from manyhead.__main__ import main; sys.exit(main({!r}))"
    for arguments in ([], ["heads", "none.npz"]):
        wrong = run_python(command.format(arguments), MH_THREADS="many")
        assert wrong.returncode == 2
        assert wrong.stderr.startswith(f"manyhead {(arguments or ['info'])[0]}: the environment variable MH_THREADS")
    wrong = run_python(call, MH_THREADS="many")
    assert wrong.returncode != 0 and "MH_THREADS" in wrong.stderr


def test_machine():
    facts = manyhead.machine()
    assert facts["isa"] == manyhead.isa() and facts["isas"] == manyhead.isas()
    assert facts["threads"] == manyhead.threads() and facts["l1_bytes"] > 0


def test_command_line(capsys):
    assert __main__.main([]) == 0
    text = capsys.readouterr().out
    for word in (manyhead.version(), manyhead.isa(), "l2 bytes", _library.path, "threads"):
        assert word in text
    assert __main__.main(["--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["isa"] == manyhead.isa() and facts["machine"] == manyhead.machine()
    for arguments, said in ((["--nonsense"], "manyhead info: "), (["profile", "--qick"], "manyhead profile: ")):
        with pytest.raises(SystemExit) as stopped:
            __main__.main(arguments)
        error = capsys.readouterr().err
        assert stopped.value.code == 2 and f"{said}error: unrecognized arguments: {arguments[-1]}" in error
    with pytest.raises(SystemExit) as stopped:
        __main__.main(["--version"])
    assert (stopped.value.code, capsys.readouterr().out) == (0, f"manyhead {manyhead.__version__}\n")


@pytest.mark.parametrize(
    ("isa", "on_unit", "said"),
    [("avx512_bf16", True, None), ("amx", True, "yes"), ("amx", False, "no"), ("avx2", True, None)],
)
def test_f32_is_on_a_unit_that_takes_it_alone(capsys, monkeypatch, isa, on_unit, said):
    facts = _runtime.describe()
    facts["machine"]["f32_on_unit"] = on_unit
    monkeypatch.setattr("manyhead.commands.info.describe", lambda: facts | {"isa": isa})
    assert __main__.main([]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("f32")] == (
        [["f32", "on", "AMX", said]] if said else []
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_under_the_output():
    command = "import sys; from manyhead.__main__ import main; sys.stdout = open('/dev/full', 'w'); sys.exit(main([]))"
    done = run_python(command)
    assert (done.returncode, done.stderr) == (1, "manyhead info: No space left on device\n")


def test_a_closed_output():
    command = "import sys; from manyhead.__main__ import main; sys.stdout = None; sys.exit(main([]))"
    done = run_python(command)
    assert (done.returncode, done.stderr) == (1, "manyhead info: standard output is closed\n")


def test_python_dash_m():
    command = "import runpy, sys; sys.argv = ['manyhead', '--json']; runpy.run_module('manyhead', run_name='__main__')"
    assert json.loads(run_python(command).stdout)["version"] == manyhead.version()


def test_a_library_that_is_not_there(tmp_path):
    failed = run_python("import manyhead", MANYHEAD_LIBRARY=str(tmp_path / "none.so"))
    assert "ImportError: manyhead's shared library was not found" in failed.stderr
    assert f"{tmp_path / 'none.so'}: no such file" in failed.stderr
    assert "The environment variable MANYHEAD_LIBRARY says so" in failed.stderr


def test_a_file_that_is_not_the_library(tmp_path):
    other = tmp_path / "other.so"
    other.write_text("text")
    failed = run_python("import manyhead", MANYHEAD_LIBRARY=str(other))
    assert "ImportError" in failed.stderr and str(other) in failed.stderr


def test_every_place_is_listed(monkeypatch):
    monkeypatch.delenv("MANYHEAD_LIBRARY", raising=False)
    places = list(_library.candidates())
    assert any(str(PACKAGE.resolve()) in place for place in places)
    assert any(".manyhead.mesonpy.libs" in place for place in places)
    assert _library.FILE_NAMES[0] in places
    monkeypatch.setattr(_library, "candidates", lambda: iter(["/nowhere/a.so", "libnot-there-manyhead.so"]))
    with pytest.raises(ImportError, match=r"(?s)/nowhere/a\.so: no such file.*libnot-there-manyhead\.so: "):
        _library.load()


def test_a_library_of_another_version(monkeypatch):
    monkeypatch.setattr(_library, "__version__", "7.3.0")
    monkeypatch.setenv("MANYHEAD_LIBRARY", _library.path)
    with pytest.raises(ImportError, match=r"is version \d+\.\d+\.\d+, this package is 7\.3\.0"):
        _library.load()
    assert _library.compatible("7.3.9") and not _library.compatible("7.4.0")


def test_the_library_is_found_beside_the_package(tmp_path):
    """As in a wheel: the package and the library folder side by side, no environment variable."""
    beside = tmp_path / "elsewhere" / "manyhead"
    beside.mkdir(parents=True)
    for file in PACKAGE.glob("*.py"):
        (beside / file.name).symlink_to(file)
    # resolve() follows the links of the files, not of their folder: copy the one that asks.
    (beside / "_library.py").unlink()
    (beside / "_library.py").write_text((PACKAGE / "_library.py").read_text())
    libraries = beside.parent / ".manyhead.mesonpy.libs"
    libraries.mkdir()
    (libraries / _library.FILE_NAMES[-1]).symlink_to(_library.path)
    code = "import manyhead; from manyhead._library import path; print(path)"
    done = run_python(code, PYTHONPATH=str(beside.parent), MANYHEAD_LIBRARY="")
    assert done.stdout.strip() == str(libraries / _library.FILE_NAMES[-1]), done.stderr


def test_the_package_is_typed_and_names_what_it_exports():
    assert (PACKAGE / "py.typed").exists()
    for name in manyhead.__all__:
        assert hasattr(manyhead, name), name
    for name in ("attention", "plan", "merge_state", "merge_states", "MultiHeadAttention", "Plan", "show_heads"):
        assert getattr(manyhead, name).__doc__, name
