"""Whether a process can be forked after an import: what a module may not leave behind.

A fork copies memory and one thread. A lock that another thread holds stays locked in the copy for
ever, and a CUDA context does not work there at all. Must always hold: the decision is pure, and
names the module and the remedy.

BLAS libraries (OpenBLAS, MKL) also start threads, and stop them around a fork by themselves
(`pthread_atfork`). Their threads have no name of their own. `HARMLESS` lists the threads with a
name for which the same is known.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

_BLAS = ("openblas", "mkl", "blis")
HARMLESS: Mapping[str, str] = {
    "jemalloc_bg_thd": "jemalloc (in pyarrow): its pthread_atfork handlers take its locks, and the "
    "copy runs without background threads",
}
"""Threads that a fork may leave behind, by the name that the kernel shows, and why."""
_CUDA = "/dev/nvidia-uvm"
"""Opened by the first call of CUDA, and by nothing that only looks at the devices."""


@dataclass(frozen=True, kw_only=True)
class Native:
    """What the kernel says of this process."""

    threads: Mapping[int, str] = field(default_factory=dict)
    """The name of each thread but the main one."""
    name: str = ""
    """That of the main thread, which threads without a name of their own inherit."""
    blas: frozenset[str] = frozenset()
    """BLAS libraries that are loaded."""
    cuda: bool = False
    """Whether CUDA is initialized."""

    @classmethod
    def here(cls) -> Native:
        """This process, now."""
        own, names = Path("/proc/self"), dict[int, str]()
        for task in (own / "task").iterdir():
            with suppress(OSError):  # it has just ended
                names[int(task.name)] = (task / "comm").read_text().strip()
        opened = set[str]()
        for descriptor in (own / "fd").iterdir():
            with suppress(OSError):
                opened.add(str(descriptor.readlink()))
        mapped = {line.rpartition("/")[2] for line in (own / "maps").read_text().splitlines()}
        return cls(
            name=names.pop(os.getpid(), ""),
            threads=names,
            blas=frozenset(each for each in mapped if any(name in each for name in _BLAS)),
            cuda=_CUDA in opened,
        )


def hindrance(module: str, before: Native, after: Native) -> str:
    """Why a process must not be forked after an import; empty if it may."""
    if after.cuda and not before.cuda:
        return f"importing {module} initializes CUDA, which does not work in forked workers"
    new = {
        thread: name
        for thread, name in after.threads.items()
        if thread not in before.threads and name not in HARMLESS
    }
    if after.blas - before.blas:
        new = {thread: name for thread, name in new.items() if name != after.name}
    if not new:
        return ""
    named = sorted({name for name in new.values() if name != after.name})
    which = f" ({', '.join(named)})" if named else ""
    return (
        f"importing {module} starts {'a thread' if len(new) == 1 else f'{len(new)} threads'}"
        f"{which}, which forked workers would lack"
    )
