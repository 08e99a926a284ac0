"""`--numa-binding`: which CPUs a worker may run on, so that its memory is near its GPU.

The local rank of a worker selects its GPU; without GPUs the workers are spread evenly over the NUMA
nodes. This module only reads /sys and /proc: the forkserver binds a worker right after the fork.

Source of the modes: torch.numa.binding.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from zero_orchestrator.errors import SpecError

Cpus = frozenset[int]


def parse_cpus(text: str) -> Cpus:
    """`0-2,4` -> {0, 1, 2, 4}: the format of the kernel's lists of CPUs and nodes."""
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
    """NUMA node -> its CPUs that this process may use; nodes without any are left out."""
    sockets: Mapping[int, int]
    """CPU -> socket."""
    cores: Mapping[int, Cpus]
    """CPU -> the CPUs (threads) of its physical core."""
    caches: Mapping[int, Cpus]
    """CPU -> the CPUs that share its last level of cache."""
    gpu_nodes: Sequence[int] = ()
    """NUMA node of each GPU, in the order of their PCI addresses."""

    def node_of(self, local_rank: int, slots: int) -> int:
        """The NUMA node of a worker: that of its GPU, else an even spread over all nodes."""
        nodes = sorted(self.nodes)
        if local_rank < len(self.gpu_nodes) and self.gpu_nodes[local_rank] in self.nodes:
            return self.gpu_nodes[local_rank]
        return nodes[local_rank * len(nodes) // slots]


def cpus_of(mode: str, machine: Machine, local_rank: int, slots: int) -> Cpus:
    """The CPUs that one worker may use.

    Raises:
        SpecError: The mode is `exclusive`, and there are more workers than cores.
    """
    # Those of all workers: who shares a node takes its share of it by the place among them.
    nodes = [machine.node_of(other, slots) for other in range(slots)]
    node = nodes[local_rank]
    own, place, sharing = machine.nodes[node], nodes[:local_rank].count(node), nodes.count(node)
    match mode:
        case "node":
            return own
        case "socket":
            sockets = machine.sockets
            on_it = (
                cpus for cpus in machine.nodes.values() if sockets[min(cpus)] == sockets[min(own)]
            )
            return frozenset().union(*on_it)
        case "exclusive":
            # An even share of the node's physical cores; the first workers get the remainder.
            cores = sorted({machine.cores[cpu] & own for cpu in own}, key=min)
            each, over = divmod(len(cores), sharing)
            if each == 0:
                raise SpecError(
                    f"--numa-binding=exclusive: {sharing} workers share the {len(cores)} cores of "
                    f"NUMA node {node}; start fewer (--nproc-per-node), or bind to node or socket"
                )
            first = place * each + min(place, over)
            return frozenset().union(*cores[first : first + each + (place < over)])
        case _:  # core-complex: one group of cores that share a cache, the largest group first
            groups = {machine.caches[cpu] & own for cpu in own}
            ordered = sorted(groups, key=lambda group: (-len(group), min(group)))
            return ordered[place % len(ordered)]


def read_machine(
    root: Path = Path("/"), allowed: Collection[int] | None = None, visible: str | None = None
) -> Machine | None:
    """Read this machine's topology; None if the kernel does not show it."""
    usable = frozenset(os.sched_getaffinity(0) if allowed is None else allowed)
    try:
        nodes = {
            int(path.name.removeprefix("node")): parse_cpus((path / "cpulist").read_text()) & usable
            for path in (root / "sys/devices/system/node").glob("node[0-9]*")
        }
        if not any(nodes.values()):
            return None
        cpu = root / "sys/devices/system/cpu"
        # The CPUs that share the highest level of data cache; a CPU without a cache is alone.
        caches: dict[int, Cpus] = {}
        for n in usable:
            levels = {
                int((cache / "level").read_text()): parse_cpus(
                    (cache / "shared_cpu_list").read_text()
                )
                for cache in (cpu / f"cpu{n}/cache").glob("index[0-9]*")
                if (cache / "type").read_text().strip() in ("Unified", "Data")
            }
            caches[n] = levels[max(levels)] if levels else frozenset({n})
        return Machine(
            nodes={node: cpus for node, cpus in nodes.items() if cpus},
            sockets={
                n: int((cpu / f"cpu{n}/topology/physical_package_id").read_text()) for n in usable
            },
            cores={
                n: parse_cpus((cpu / f"cpu{n}/topology/thread_siblings_list").read_text())
                for n in usable
            },
            caches=caches,
            gpu_nodes=_gpu_nodes(root, visible),
        )
    except (OSError, ValueError):  # workers then run unbound, as on any other machine
        return None


def _gpu_nodes(root: Path, visible: str | None) -> list[int]:
    """The NUMA node of each visible NVIDIA GPU, in CUDA's order; empty if that is unknown."""
    gpus = sorted(path.name for path in (root / "proc/driver/nvidia/gpus").glob("*"))
    paths = (root / "sys/bus/pci/devices" / gpu.lower() / "numa_node" for gpu in gpus)
    nodes = [max(0, int(path.read_text())) for path in paths]  # -1: there is only node 0
    if not visible:
        return nodes
    indices = [part.strip() for part in visible.split(",")]
    # CUDA_VISIBLE_DEVICES may have names that are no numbers: those of GPUs, or of parts of them.
    if not all(index.isdecimal() and int(index) < len(nodes) for index in indices):
        return []
    return [nodes[int(index)] for index in indices]
