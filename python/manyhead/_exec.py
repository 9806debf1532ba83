"""How a call is run: on how many threads and whose, in which workspace.

PyTorch's tensors are computed on PyTorch's threads. These spin for milliseconds after each of its calls, and threads of
our own would get half of the CPUs that they are on. Where they sleep at once they take longer to wake up than ours.
"""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress
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
    """exec.threads; None and 0 mean the default."""
    count = 0 if threads is None else integer(threads, "threads")
    if not 0 <= count < 2**31:
        raise ValueError(f"threads is {count}, must be at least 0 and fit 32 bits")
    return count


def _meet(kind: type) -> _Runtime:
    """Looks at PyTorch when the first of its tensors is there. Never imports it."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(tensor := getattr(torch, "Tensor", None), type) or not issubclass(kind, tensor):
        return _NONE
    openmp = None if _threads_sleep() else _find_openmp(torch)
    if openmp is None:
        runtime = _NONE
    else:
        execution = _abi.Exec(ctypes.sizeof(_abi.Exec))
        execution.openmp = ctypes.addressof(openmp)
        execution.keeps = openmp
        runtime = execution.openmp, byref(execution)
    return _runtimes.setdefault(kind, runtime)


def _threads_sleep() -> bool:
    """Whether the environment has OpenMP's idle threads sleep at once."""
    policy = os.environ.get("OMP_WAIT_POLICY", "").strip().lower()
    return policy == "passive" or any(os.environ.get(name) == "0" for name in ("GOMP_SPINCOUNT", "KMP_BLOCKTIME"))


def _find_openmp(torch: Any) -> _abi.OpenMP | None:
    """The OpenMP runtime that PyTorch computes on, if it is one with libgomp's functions."""
    try:
        if not torch.backends.openmp.is_available():
            return None
        process = ctypes.CDLL(None)  # PyTorch loads it for the whole process
        parallel = process.GOMP_parallel
        most = process.omp_get_max_threads
        numbers = process.omp_get_thread_num, process.omp_get_num_threads
    except (AttributeError, OSError, TypeError):  # the last: there is no such thing as the process
        return None
    with suppress(AttributeError, OSError, TypeError):
        # Its first call in a thread passes torch.set_num_threads on to that thread's team.
        most = ctypes.CDLL(torch._C.__file__)._ZN2at15get_num_threadsEv
    functions = (cast(function, c_void_p) for function in (parallel, most, *numbers))
    return _abi.OpenMP(ctypes.sizeof(_abi.OpenMP), *functions)
