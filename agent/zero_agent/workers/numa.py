"""`--numa-binding`: which CPUs a worker may run on, so that its memory is near its GPU.

The GPU of a worker is the one its local rank selects; without GPUs the workers are spread evenly
over the NUMA nodes. Everything is read from /sys and /proc, nothing is bound here: the forkserver
does that, right after the fork. On a machine with one NUMA node, `node` and `socket` change
nothing and every mode still works.

Source of the modes: torch.numa.binding.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from zero_orchestrator.errors import SpecError

Cpus = frozenset[int]


def parse_cpus(text: str) -> Cpus:
    """`0-2,4` -> {0, 1, 2, 4}: the kernel's lists of CPUs and nodes."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The parts of a machine that binding looks at."""

    nodes: Mapping[int, Cpus]
    """NUMA node -> those of its CPUs that we may use; nodes without any are left out."""
    sockets: Mapping[int, int]
    """CPU -> socket."""
    cores: Mapping[int, Cpus]
    """CPU -> the CPUs (threads) of its physical core."""
    caches: Mapping[int, Cpus]
    """CPU -> the CPUs that share its last level of cache."""
    gpu_nodes: Sequence[int] = ()
    """NUMA node of each GPU, in the order of their PCI addresses."""

    def node_of(self, local_rank: int, slots: int) -> int:
        """The NUMA node that a worker belongs to."""
        nodes = sorted(self.nodes)
        if local_rank < len(self.gpu_nodes) and self.gpu_nodes[local_rank] in self.nodes:
            return self.gpu_nodes[local_rank]
        return nodes[local_rank * len(nodes) // slots] if local_rank < slots else nodes[0]


@dataclass(frozen=True, kw_only=True)
class _Seat:
    """One worker's claim: its node, and its place among the workers of that node."""

    machine: Machine
    node: int
    place: int
    neighbours: int

    @property
    def cpus(self) -> Cpus:
        return self.machine.nodes[self.node]


def cpus_of(mode: str, machine: Machine, local_rank: int, slots: int) -> Cpus:
    """The CPUs one worker may use.

    Args:
        mode: node, socket, exclusive or core-complex.
        machine: This one.
        local_rank: The worker's.
        slots: Workers on this node.

    Raises:
        SpecError: `exclusive`, and there are more workers than cores.
    """
    nodes = [machine.node_of(other, slots) for other in range(slots)]
    node = nodes[local_rank]
    seat = _Seat(
        machine=machine,
        node=node,
        place=nodes[:local_rank].count(node),
        neighbours=nodes.count(node),
    )
    return _MODES[mode](seat)


def _node(seat: _Seat) -> Cpus:
    return seat.cpus


def _socket(seat: _Seat) -> Cpus:
    sockets = seat.machine.sockets
    mine = sockets[min(seat.cpus)]
    on_it = (cpus for cpus in seat.machine.nodes.values() if sockets[min(cpus)] == mine)
    return frozenset().union(*on_it)


def _exclusive(seat: _Seat) -> Cpus:
    """An even share of the node's physical cores; the first ones get what is left over."""
    cores = sorted({seat.machine.cores[cpu] & seat.cpus for cpu in seat.cpus}, key=min)
    each, over = divmod(len(cores), seat.neighbours)
    if each == 0:
        raise SpecError(
            f"--numa-binding=exclusive: {seat.neighbours} workers share the {len(cores)} cores of "
            f"NUMA node {seat.node}; start fewer (--nproc-per-node), or bind to node or socket"
        )
    first = seat.place * each + min(seat.place, over)
    return frozenset().union(*cores[first : first + each + (seat.place < over)])


def _core_complex(seat: _Seat) -> Cpus:
    """One group of cores that share a cache, the largest first; in turn, when they are short."""
    groups = {seat.machine.caches[cpu] & seat.cpus for cpu in seat.cpus}
    ordered = sorted(groups, key=lambda group: (-len(group), min(group)))
    return ordered[seat.place % len(ordered)]


_MODES: Mapping[str, Callable[[_Seat], Cpus]] = {
    "node": _node,
    "socket": _socket,
    "exclusive": _exclusive,
    "core-complex": _core_complex,
}


def read_machine(
    root: Path = Path("/"), allowed: Collection[int] | None = None, visible: str | None = None
) -> Machine | None:
    """This machine, as far as it can be read; None where the kernel does not tell.

    Args:
        root: What to take for the root of the file system.
        allowed: CPUs that may be used; this process's own by default.
        visible: CUDA_VISIBLE_DEVICES, if it is set.
    """
    usable = frozenset(os.sched_getaffinity(0) if allowed is None else allowed)
    try:
        nodes = {
            int(path.name.removeprefix("node")): parse_cpus((path / "cpulist").read_text()) & usable
            for path in (root / "sys/devices/system/node").glob("node[0-9]*")
        }
        cpu = root / "sys/devices/system/cpu"
        return (
            Machine(
                nodes={node: cpus for node, cpus in nodes.items() if cpus},
                sockets={
                    n: int((cpu / f"cpu{n}/topology/physical_package_id").read_text())
                    for n in usable
                },
                cores={
                    n: parse_cpus((cpu / f"cpu{n}/topology/thread_siblings_list").read_text())
                    for n in usable
                },
                caches={n: _last_cache(cpu / f"cpu{n}/cache", n) for n in usable},
                gpu_nodes=_visible(_gpu_nodes(root), visible),
            )
            if any(nodes.values())
            else None
        )
    except (OSError, ValueError):
        return None


def _last_cache(directory: Path, cpu: int) -> Cpus:
    """The CPUs that share the highest level of data cache; the CPU alone where there is none."""
    levels = {
        int((cache / "level").read_text()): parse_cpus((cache / "shared_cpu_list").read_text())
        for cache in directory.glob("index[0-9]*")
        if (cache / "type").read_text().strip() in ("Unified", "Data")
    }
    return levels[max(levels)] if levels else frozenset({cpu})


def _gpu_nodes(root: Path) -> list[int]:
    """NUMA nodes of the NVIDIA GPUs; the kernel's -1 means that there is only node 0."""
    gpus = sorted(path.name for path in (root / "proc/driver/nvidia/gpus").glob("*"))
    paths = (root / "sys/bus/pci/devices" / gpu.lower() / "numa_node" for gpu in gpus)
    return [max(0, int(path.read_text())) for path in paths]


def _visible(nodes: Sequence[int], devices: str | None) -> list[int]:
    """Those of the devices that CUDA shows, in its order; names that are no numbers hide it."""
    if not devices:
        return list(nodes)
    indices = [part.strip() for part in devices.split(",")]
    if not all(index.isdecimal() and int(index) < len(nodes) for index in indices):
        return []
    return [nodes[int(index)] for index in indices]
