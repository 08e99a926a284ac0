"""Reading the memory of another process of this host, where the kernel lets us.

Owns the call. Allowed where a debugger would be: the same user, and no Yama that forbids it.

Used by `neighbours`. Source of the idea: cross-memory attach, as MPI libraries use it.
"""

from __future__ import annotations

import ctypes
import os


class _Range(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("bytes", ctypes.c_size_t))


def read(pid: int, address: int, into: int, size_bytes: int) -> None:
    """Copy `size_bytes` bytes at `address` of process `pid` to the address `into` of this one.

    Raises:
        OSError: There is no such process or memory, it may not be read, or no such call here.
    """
    done = 0
    while done < size_bytes:
        here = _Range(into + done, size_bytes - done)
        there = _Range(address + done, size_bytes - done)
        count = _call()(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if count <= 0:
            code = ctypes.get_errno()
            raise OSError(code, f"reading the memory of process {pid}: {os.strerror(code)}")
        done += count


def let_siblings_read() -> None:
    """Let the parent of this process, and all below it, read this process's memory.

    Only that which Yama adds on some systems (ptrace_scope 1: none but ancestors may) is lifted,
    and only for them; where there is no Yama nothing happens. Source: prctl(2), PR_SET_PTRACER.
    """
    _LIBRARY.prctl(_PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)


_PR_SET_PTRACER = 0x59616D61
_LIBRARY = ctypes.CDLL(None, use_errno=True)


def _call() -> ctypes._NamedFuncPointer:
    try:
        function = _LIBRARY.process_vm_readv
    except AttributeError as error:
        raise OSError(f"there is no process_vm_readv here: {error}") from None
    function.restype = ctypes.c_ssize_t
    return function
