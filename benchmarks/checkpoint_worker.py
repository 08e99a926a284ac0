"""One rank of `checkpoint.py`: a model, its checkpoints in each system, and the ceilings.

Every operation begins behind a barrier and returns what it took on this rank: seconds, and
bytes where they are counted. Nothing is simulated: an engine with a real optimizer state, real
files, fsync on both sides. Files are dropped from the page cache before they are read.
"""

from __future__ import annotations

import gc
import mmap
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_memory import node_memory
from counters import begin_memory, bytes_read, forget, resident_bytes
from inside import persistence_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import zero_deepspeed
from zero_checkpoint import StoreConsensus, find
from zero_checkpoint.memory.node import MemoryNode
from zero_checkpoint.memory.peers import ReplicaPeers
from zero_checkpoint.saving.memory_commit import MemorySave, commit_in_memory
from zero_checkpoint.saving.staging import StagingBuffer
from zero_checkpoint.saving.staging_memory import SharedStaging
from zero_comm.worker.distributed import group_store
from zero_engine.core.engine import Engine

Took = dict[str, float]
GPT2_BLOCK = ((2304, 768), (2304,), (768, 768), (768,), (3072, 768), (3072,), (768, 3072), (768,))
CHUNK_BYTES = 16 << 20
MEMORY_BYTES = 8 << 30
"""Of a node, at most: two images, and two copies of another node's."""


class Bag(nn.Module):
    """Parameters of given shapes; its forward touches each of them."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(shape) for shape in shapes])

    def forward(self, x: Tensor) -> Tensor:
        return x + sum(weight.flatten()[0] for weight in self.weights)


class Bags(nn.Module):
    def __init__(self, shapes: list[list[tuple[int, ...]]]) -> None:
        super().__init__()
        self.bags = nn.ModuleList(Bag(each) for each in shapes)

    def forward(self, x: Tensor) -> Tensor:
        for bag in self.bags:
            x = bag(x)
        return x


def shapes_of(workload: str, quick: bool) -> list[list[tuple[int, ...]]]:
    """The shapes of each module of a workload."""
    if workload == "gpt2":
        norms = ((768,),) * 4
        blocks = [[*norms, *GPT2_BLOCK] for _ in range(1 if quick else 12)]
        embeddings = [(1024 if quick else 50257, 768), (1024, 768), (768,), (768,)]
        return [*blocks, embeddings]
    return [[(4096,)] * 100 for _ in range(5 if quick else 100)]


class Bench:
    """This rank's engine and the peers' view of the same state."""

    def __init__(self, workload: str, quick: bool, root: Path, node: MemoryNode) -> None:
        self.root = root
        torch.manual_seed(dist.get_rank())
        settings = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 2},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "checkpoint": {"weight_hash": False},
        }
        model = Bags(shapes_of(workload, quick))
        self.engine: Engine
        self.engine, *_ = zero_deepspeed.initialize(model=model, config=settings)
        self.engine.backward(self.engine(torch.zeros(())))
        self.engine.step()
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        # It fsyncs as we do. Staging memory that is used again needs an accelerator in DCP.
        self._writer = dcp.FileSystemWriter(root, single_file_per_rank=True, thread_count=1)
        self.peer_state = self._peer_state(per_tensor=workload != "gpt2")
        state = self.engine._state.capture({"weight_hash": None}, {})
        self.own_bytes = sum(piece.data.nbytes for piece in state.pieces)
        self._staging = random_bytes(self.own_bytes)
        self._source = random_bytes(self.own_bytes)
        self._node = node
        self._neighbours = ReplicaPeers(node.key)
        self._consensus = StoreConsensus(
            group_store("benchmark"), dist.get_rank(), dist.get_world_size()
        )
        self._stagings = [
            StagingBuffer(SharedStaging("benchmark", dist.get_rank(), node.directory))
            for _ in range(2)
        ]
        for staging in self._stagings:  # reserves it: what is measured is a later save
            staging.snapshot(persistence_of(self.engine).saver.lay_out(state))
        self._kept = 0

    def _peer_state(self, *, per_tensor: bool) -> dict[str, DTensor]:
        """Parameters and two moments as DTensors: one a unit, DCP's best case, or one each."""
        found = {}
        for unit in self.engine._core.units:
            sizes = {unit.spec.name: unit.layout.numel}
            if per_tensor:
                sizes = {slot.fqn: slot.numel for slot in unit.layout.slots}
            for kind in ("param", "exp_avg", "exp_avg_sq"):
                found |= {f"{kind}/{n}": distributed(size, self.mesh) for n, size in sizes.items()}
        return found

    # ---- ceilings ----

    def memcpy(self) -> Took:
        """Copy this rank's bytes to memory that is there already."""
        return timed(lambda: self._staging.copy_(self._source))

    def disk(self, direct: bool) -> Took:
        """Write this rank's bytes and fsync, in the plainest way there is."""
        path = self.root / f"ceiling{dist.get_rank()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | (os.O_DIRECT if direct else 0)
        # A mapping begins on a page, which direct writing needs; its odd tail is left out.
        data = memoryview(self._source.numpy())
        start = -self._source.data_ptr() % 4096
        data = data[start : start + (len(data) - start) // 4096 * 4096]

        def write() -> None:
            descriptor = os.open(path, flags, 0o600)
            for begin in range(0, len(data), CHUNK_BYTES):
                os.write(descriptor, data[begin : begin + CHUNK_BYTES])
            os.fsync(descriptor)
            os.close(descriptor)

        took = timed(write)
        path.unlink()
        return took

    # ---- saving ----

    def save_ours(self, blocking: bool) -> Took:
        root = self.fresh("ours")

        def begin() -> Callable[[], object]:
            self.engine.save_checkpoint(root, blocking=blocking)
            return self.engine.wait_for_checkpoint

        return self._saved(root, begin)

    def save_dcp(self, blocking: bool) -> Took:
        root = self.fresh("dcp")

        def begin() -> Callable[[], object]:
            if blocking:
                dcp.save(self.peer_state, checkpoint_id=root, storage_writer=self._writer)
                return lambda: None
            return dcp.async_save(
                self.peer_state, checkpoint_id=root, storage_writer=self._writer
            ).result

        return self._saved(root, begin)

    def save_in_memory(self) -> Took:
        """Copied, committed by all ranks, and copied once more to the neighbour's memory."""
        self._kept += 1

        def begin() -> Callable[[], object]:
            state = self.engine._state.capture({"weight_hash": None}, {})
            layout = persistence_of(self.engine).saver.lay_out(state)
            save = MemorySave(
                root=self.root / "ours",
                state=state,
                image=self._stagings[self._kept % 2].snapshot(layout),
                problem="",
                step=self._kept,
                tag=f"global_step{self._kept}",
                round=1,
                fence=None,
                newest=lambda: None,
                replicas=1,
            )
            return lambda: commit_in_memory(save, self._consensus, self._node, self._neighbours)

        return self._saved(self._node.directory, begin)

    def _saved(self, root: Path, begin: Callable[[], Callable[[], object]]) -> Took:
        prepare()
        before = begin_memory()
        started = time.perf_counter()
        wait = begin()
        stall = time.perf_counter() - started
        wait()
        dist.barrier()  # a checkpoint is there when the last rank's part is
        durable = time.perf_counter() - started
        peak = resident_bytes("VmHWM:") - before
        size = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
        files = sum(path.is_file() for path in root.rglob("*"))
        return {
            "stall_s": stall,
            "durable_s": durable,
            "size": size,
            "files": files,
            "peak": peak,
        }

    def fresh(self, system: str) -> Path:
        """An empty directory that all ranks know."""
        root = self.root / system
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(root, ignore_errors=True)
            root.mkdir()
        dist.barrier()
        return root

    # ---- loading ----

    def load_ours(self) -> Took:
        root = self.root / "ours"
        assert find(root).candidates
        return self._loaded(root, lambda: self.engine.load_checkpoint(root))

    def load_dcp(self) -> Took:
        root = self.root / "dcp"
        reader = dcp.FileSystemReader(root)
        return self._loaded(root, lambda: dcp.load(self.peer_state, storage_reader=reader))

    def read_raw(self, direct: bool) -> Took:
        """Read this rank's part of the files' bytes in the plainest way; do nothing with them."""
        files = sorted((self.root / "ours").glob("step-*/r*.safetensors"))
        flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
        chunk = memoryview(random_bytes(CHUNK_BYTES).numpy())
        rank, world = dist.get_rank(), dist.get_world_size()

        def read() -> None:
            for path in files:
                size = path.stat().st_size
                pages = -(-size // 4096)
                begin, end = (pages * part // world * 4096 for part in (rank, rank + 1))
                descriptor = os.open(path, flags)
                while begin < min(end, size):
                    begin += os.preadv(descriptor, [chunk[: end - begin]], begin)
                os.close(descriptor)

        return self._loaded(self.root / "ours", read)

    def _loaded(self, root: Path, load: Callable[[], object]) -> Took:
        forget(root)
        before, memory = bytes_read(), begin_memory()
        took = timed(load)
        peak = resident_bytes("VmHWM:") - memory
        return {"load_s": took["s"], "read": bytes_read() - before, "peak": peak}

    def close(self) -> None:
        self.engine.destroy()
        for staging in self._stagings:
            staging.close()


def random_bytes(size: int) -> Tensor:
    """In huge pages, where there are any: disks take them the fastest."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).random_()


def distributed(size: int, mesh: DeviceMesh) -> DTensor:
    """A vector, divided as DTensor does it: all ranks but the last have equal shares."""
    share = -(-size // mesh.size())
    begin = min(mesh.get_rank() * share, size)
    shard = torch.randn(min(share, size - begin))
    shape = torch.Size([size])
    return DTensor.from_local(shard, mesh, [Shard(0)], run_check=False, shape=shape, stride=(1,))


def prepare() -> None:
    """On all ranks: nobody pays for the garbage of the operation before, 0.5 s after one of DCP."""
    gc.collect()
    dist.barrier()


def timed(work: Callable[[], object]) -> Took:
    prepare()
    started = time.perf_counter()
    work()
    dist.barrier()
    return {"s": time.perf_counter() - started}


SAVES: dict[str, Callable[[Bench], Took]] = {
    "memcpy": Bench.memcpy,
    "disk, cached": lambda bench: bench.disk(direct=False),
    "disk, direct": lambda bench: bench.disk(direct=True),
    "ours": lambda bench: bench.save_ours(blocking=True),
    "DCP": lambda bench: bench.save_dcp(blocking=True),
    "ours, async": lambda bench: bench.save_ours(blocking=False),
    "DCP, async": lambda bench: bench.save_dcp(blocking=False),
    "ours, in memory": Bench.save_in_memory,
}
LOADS: dict[str, Callable[[Bench], Took]] = {
    "disk, cached": lambda bench: bench.read_raw(direct=False),
    "disk, direct": lambda bench: bench.read_raw(direct=True),
    "ours": Bench.load_ours,
    "DCP": Bench.load_dcp,
}


def run_rank(
    rank: int, world: int, port: int, root: Path, workload: str, quick: bool, plan: list[str]
) -> list[tuple[str, Took]]:
    """Carry out a plan, such as ["save ours", "load DCP"]; what each took on this rank."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    results = []
    with node_memory(rank, MEMORY_BYTES) as node:
        bench = Bench(workload, quick, root, node)
        for operation in plan:
            kind, _, name = operation.partition(" ")
            table = SAVES if kind == "save" else LOADS
            results.append((operation, {**table[name](bench), "own": bench.own_bytes}))
        bench.close()
        dist.barrier()
    dist.destroy_process_group()
    return results
