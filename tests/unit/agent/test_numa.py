"""Which CPUs a worker gets, on machines that are described as the kernel describes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from zero_agent.workers.numa import Machine, cpus_of, parse_cpus, read_machine
from zero_orchestrator.errors import SpecError


def described(root: Path, nodes: list[str], sockets: list[int], gpus: tuple[int, ...] = ()) -> Path:
    """A root of /sys and /proc: two threads a core (n, n+1), four CPUs a cache."""
    for node, (cpulist, socket) in enumerate(zip(nodes, sockets, strict=True)):
        write(root / f"sys/devices/system/node/node{node}/cpulist", cpulist)
        for cpu in parse_cpus(cpulist):
            at = root / f"sys/devices/system/cpu/cpu{cpu}"
            core, cache = cpu - cpu % 2, cpu - cpu % 4
            write(at / "topology/physical_package_id", str(socket))
            write(at / "topology/thread_siblings_list", f"{core}-{core + 1}")
            for level, (kind, shared) in enumerate(
                [("Instruction", "0-99"), ("Data", str(cpu)), ("Unified", f"{cache}-{cache + 3}")]
            ):
                write(at / f"cache/index{level}/type", kind)
                write(at / f"cache/index{level}/level", str(max(1, level * 2 - 1)))
                write(at / f"cache/index{level}/shared_cpu_list", shared)
    for index, node in enumerate(gpus):
        address = f"0000:{index:02X}:00.0"
        (root / "proc/driver/nvidia/gpus" / address).mkdir(parents=True)
        write(root / "sys/bus/pci/devices" / address.lower() / "numa_node", str(node))
    return root


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Two sockets of two NUMA nodes of eight CPUs; GPUs on nodes 1, 1, 3, 0."""
    root = described(tmp_path, ["0-7", "8-15", "16-23", "24-31"], [0, 0, 1, 1], (1, 1, 3, 0))
    found = read_machine(root, allowed=range(32))
    assert found is not None
    return found


def span(first: int, last: int) -> frozenset[int]:
    return frozenset(range(first, last + 1))


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("node", [span(8, 15), span(8, 15), span(24, 31), span(0, 7)]),
        ("socket", [span(0, 15), span(0, 15), span(16, 31), span(0, 15)]),
        ("exclusive", [span(8, 11), span(12, 15), span(24, 31), span(0, 7)]),
        ("core-complex", [span(8, 11), span(12, 15), span(24, 27), span(0, 3)]),
    ],
)
def test_a_worker_is_bound_near_its_gpu(machine, mode, expected):
    assert [cpus_of(mode, machine, local, 4) for local in range(4)] == expected


def test_without_gpus_workers_are_spread_over_the_nodes(tmp_path):
    machine = read_machine(described(tmp_path, ["0-7", "8-15"], [0, 1]), allowed=range(16))
    found = [cpus_of("exclusive", machine, local, 4) for local in range(4)]
    assert found == [span(0, 3), span(4, 7), span(8, 11), span(12, 15)]


def test_cores_that_do_not_divide_go_to_the_first_workers_and_no_core_to_two(tmp_path):
    machine = read_machine(described(tmp_path, ["0-7"], [0]), allowed=range(8))
    found = [cpus_of("exclusive", machine, local, 3) for local in range(3)]
    assert found == [span(0, 3), span(4, 5), span(6, 7)]


def test_more_workers_than_cores_cannot_have_one_each(tmp_path):
    machine = read_machine(described(tmp_path, ["0-3"], [0]), allowed=range(4))
    with pytest.raises(SpecError, match="exclusive: 3 workers share the 2 cores of NUMA node 0"):
        cpus_of("exclusive", machine, 0, 3)
    assert [cpus_of("core-complex", machine, local, 3) for local in range(3)] == [span(0, 3)] * 3


def test_only_cpus_that_may_be_used_are_given_out(tmp_path):
    root = described(tmp_path, ["0-7", "8-15"], [0, 0], gpus=(1,))
    machine = read_machine(root, allowed=[0, 1, 2, 3])
    assert set(machine.nodes) == {0}
    assert cpus_of("node", machine, 0, 1) == span(0, 3)


def test_cuda_visible_devices_selects_the_gpus(tmp_path):
    root = described(tmp_path, ["0-7", "8-15"], [0, 1], gpus=(0, 1, -1))

    def first(visible: str | None) -> frozenset[int]:
        machine = read_machine(root, allowed=range(16), visible=visible)
        return cpus_of("node", machine, 0, 1)

    assert (first(None), first("1,0"), first("2")) == (span(0, 7), span(8, 15), span(0, 7))
    assert read_machine(root, allowed=range(16), visible="GPU-5f3").gpu_nodes == []


def test_this_machine_can_be_read_and_another_one_is_nothing(tmp_path):
    machine = read_machine()
    if machine is not None:
        for mode in ("node", "socket", "core-complex"):
            assert cpus_of(mode, machine, 0, 1)
    assert read_machine(tmp_path) is None
