"""How a call is run: on how many threads and whose, in which workspace.

PyTorch's tensors are computed on PyTorch's threads. These spin for milliseconds after each of its calls, and threads of
our own would get half of the CPUs that they are on. With OMP_WAIT_POLICY=PASSIVE they sleep, and take longer to wake up
than our own.
"""

from __future__ import annotations

import ctypes
import os
import sys
from ctypes import byref, c_void_p, cast
from typing import Any

import numpy as np

from . import _abi
from ._arrays import address, integer, view

# Kind of array -> the mh_openmp of the library that it belongs to, and the mh_exec of calls that ask for nothing.
_Runtime = tuple[int | None, Any]
_NONE: _Runtime = None, None
_runtimes: dict[type, _Runtime] = {np.ndarray: _NONE}


def make_exec(like: Any, threads: int | None, workspace: Any = None) -> Any:
    """A pointer to the mh_exec of a call by arrays of this kind, or None."""
    openmp, default = _runtimes.get(type(like)) or _meet(type(like))
    if threads is None and workspace is None:
        return default
    execution = _abi.Exec(ctypes.sizeof(_abi.Exec), thread_limit(threads))
    execution.openmp = openmp
    if workspace is not None:
        array = view(workspace, "workspace")
        if not (array.flags.writeable and array.flags.c_contiguous):
            raise ValueError("workspace must be writable and contiguous")
        execution.workspace = address(array)
        execution.workspace_size = array.nbytes
        execution.keeps = array
    return byref(execution)


def thread_limit(threads: int | None) -> int:
    """exec.threads; None and 0 mean manyhead.threads()."""
    count = 0 if threads is None else integer(threads, "threads")
    if not 0 <= count < 2**31:
        raise ValueError(f"threads is {count}, must be at least 0 and fit 32 bits")
    return count


def _meet(kind: type) -> _Runtime:
    """Looks at PyTorch when the first of its tensors is there. Never imports it."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(tensor := getattr(torch, "Tensor", None), type) or not issubclass(kind, tensor):
        return _NONE
    sleeps = os.environ.get("OMP_WAIT_POLICY", "").strip().lower() == "passive"
    openmp = _find_openmp() if torch.backends.openmp.is_available() and not sleeps else None
    if openmp is None:
        runtime = _NONE
    else:
        execution = _abi.Exec(ctypes.sizeof(_abi.Exec))
        execution.openmp = ctypes.addressof(openmp)
        execution.keeps = openmp
        runtime = execution.openmp, byref(execution)
    return _runtimes.setdefault(kind, runtime)


def _find_openmp() -> _abi.OpenMP | None:
    """The OpenMP runtime that PyTorch loads for the whole process, if it is one with libgomp's functions."""
    try:
        process = ctypes.CDLL(None)
        functions = (
            process.GOMP_parallel,
            process.omp_get_max_threads,
            process.omp_get_thread_num,
            process.omp_get_num_threads,
        )
    except (AttributeError, OSError, TypeError):  # the last: there is no such thing as the process
        return None
    return _abi.OpenMP(ctypes.sizeof(_abi.OpenMP), *(cast(function, c_void_p) for function in functions))
