"""The engine over a process group with NCCL's semantics, and that group itself."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zero_deepspeed
from tests.numerics.promises.back_ends import WITH_EVERYTHING, hashes, training
from tests.numerics.promises.test_leaving import drained
from tests.numerics.test_branches import (
    EVERY,
    LEFT_OUT,
    TWICE,
    Branching,
    Layer,
    Samples,
    branching_engine,
    run,
)
from tests.numerics.test_leaving import ROUND, die_in, exit_code_of, under_agent
from tests.numerics.test_lifetime import left_over
from tests.numerics.test_node_reduction import hashes as hashes_of_cases
from tests.numerics.test_reduction_order import digest, expected
from tests.support.queued import BACKEND, QueuedGroup
from tests.support.training import config, make_engine, train
from tests.support.waiting import wait_for
from tests.support.world import WorldError, WorldPool, pids
from zero_comm.errors import Diverged, LeavingNow
from zero_comm.exchange.collectives import Collectives, wait
from zero_comm.exchange.transports import StagedTransport
from zero_comm.topology import ENV_NODE_RANKS, Topology
from zero_comm.waiting import Interrupt
from zero_comm.worker.distributed import leave_group
from zero_contract.worker import ExitCode, Left
from zero_deepspeed.zero import GatheredParameters
from zero_engine.core.engine import Engine

CPU = torch.device("cpu")
CLIPPED = replace(WITH_EVERYTHING, max_norm=0.05)

# ---- the group: NCCL's rules ----


def never_ends(work: dist.Work) -> bool:
    """Whether an operation has not ended in the time that all others here take; then it must be
    aborted."""
    thread = threading.Thread(target=_swallow, args=(work.wait,), daemon=True)
    thread.start()
    thread.join(0.5)
    return thread.is_alive()


def _swallow(call: Callable[[], object]) -> None:
    with suppress(dist.DistBackendError):
        call()


def rules(rule: str) -> Any:
    """What one rank sees of one rule."""
    rank, world = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    assert isinstance(group, QueuedGroup)
    mine, others = torch.full((2,), float(rank)), torch.zeros(world * 2)
    match rule:
        case "asynchronous":
            work = dist.all_gather_into_tensor(others, mine, async_op=True)
            wait_for(work.ended.is_set, 10, "the queue")
            before = (work.is_completed(), bool(others.isnan().all()))
            work.wait()
            return before, work.is_completed(), others[::2].tolist()
        case "order":  # of the same size: mixed up, whatever the names and tags say
            first, second = torch.zeros(2), torch.zeros(2)
            calls = [("a", first), ("b", second)]
            for tag, tensor in calls if rank == 0 else calls[::-1]:
                way = dist.isend if rank == 0 else dist.irecv
                tensor.fill_(ord(tag))
                dist.batch_isend_irecv([dist.P2POp(way, tensor, 1 - rank, tag=ord(tag))])[0].wait()
            return [chr(int(each[0])) for each in (first, second)]
        case "size":
            work = dist.all_gather_into_tensor(
                torch.zeros(world * (2 + rank)), torch.zeros(2 + rank), async_op=True
            )
            stuck = never_ends(work)
        case "sends":  # without a batch each waits for the other's receive
            works = [dist.isend(mine, 1 - rank), dist.irecv(torch.zeros(2), 1 - rank)]
            stuck = all(map(never_ends, works))
        case "lost":
            if rank == 1:
                return None
            work = dist.all_gather_into_tensor(others, mine, async_op=True)
            stuck = never_ends(work)
        case "changed":
            work = dist.all_gather_into_tensor(others, mine, async_op=True)
            mine.zero_()
            mine.sub_(1)
            with pytest.raises(AssertionError, match="changed before its send"):
                work.wait()
            return True
    dist.distributed_c10d._abort_process_group()
    return stuck


@pytest.mark.parametrize(
    ("rule", "seen"),
    [
        ("asynchronous", [((False, True), True, [0.0, 1.0])] * 2),
        ("order", [["a", "b"], ["b", "a"]]),
        ("size", [True] * 2),
        ("sends", [True] * 2),
        ("lost", [True, None]),
        ("changed", [True] * 2),
    ],
)
def test_the_group_is_as_strict_as_nccl(worlds: WorldPool, rule: str, seen: list[Any]) -> None:
    assert worlds.run(2, rules, rule, backend=BACKEND) == seen


# ---- the engine over it ----


def normed(back_end: str) -> float | None:
    """The last norm, of gradients at the weights of the steps before: every bit of them counts."""
    own = training(CLIPPED, back_end)
    own.train(3)
    return own.norm


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.corners(world=[2])
def test_every_back_end_gives_the_same_bits_over_it(worlds: WorldPool, world: int) -> None:
    (alone,) = worlds.run(1, normed, "plain")
    for back_end in ("stage0", "stage1", "stage2", "stage3", "ddp", "fsdp2"):
        found = worlds.run(world, normed, back_end, backend=BACKEND)
        assert found == [alone] * world, back_end


def in_flight(stage: int, blocks: int) -> int:
    """The largest number of units whose gradients are on their way at once, in one backward."""
    torch.manual_seed(5)
    model = Branching([list(range(blocks))])
    model.layers = torch.nn.ModuleList(Layer() for _ in range(blocks))
    settings = config(stage, train_batch_size=4)
    engine, *_ = zero_deepspeed.initialize(model=model, training_data=Samples(), config=settings)
    assert engine._core.reducer is not None
    under_way, found = engine._core.reducer.pipeline.under_way, [0]
    for layer in model.layers:
        layer.up.weight.register_hook(lambda _: found.append(len(under_way)))
    train(engine, 1)
    return max(found)


@pytest.mark.parametrize("nodes", ["1", "2"])
@pytest.mark.corners(nodes=["1"])
def test_stage_3_keeps_no_more_gradients_under_way_than_a_step_of_a_sum_has_exchanges(
    worlds: WorldPool, nodes: str
) -> None:
    """The host runs ahead of a device, which it never finds to have finished anything."""
    assert worlds.run(4, on_nodes, nodes, in_flight, 3, 9, backend=BACKEND) == [int(nodes)] * 4


def on_nodes(nodes: str, job: Callable[..., Any], *args: Any) -> Any:
    """The result of a job on nodes of so many ranks."""
    os.environ[ENV_NODE_RANKS] = nodes
    try:
        return job(*args)
    finally:
        del os.environ[ENV_NODE_RANKS]


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("ways", [LEFT_OUT, [[4, 2, 3, 1, 0]], TWICE], ids=str)
@pytest.mark.parametrize("nodes", ["1", "2"])
@pytest.mark.corners(stage=[3], ways=[LEFT_OUT], nodes=["1"])
def test_ranks_that_leave_modules_out_train_to_the_same_bits_over_it(
    worlds: WorldPool, stage: int, ways: list[list[int]], nodes: str
) -> None:
    (alone,) = worlds.run(1, run, 0, ways, {})
    assert worlds.run(3, on_nodes, nodes, run, stage, ways, {}, backend=BACKEND) == [alone] * 3


HPZ = {"zero_hpz_partition_size": 2}


@pytest.mark.parametrize(("world", "nodes", "zero"), [(2, "1", {}), (4, "2", {}), (4, "1", HPZ)])
@pytest.mark.corners(world=[4])
def test_ranks_that_gather_in_different_orders_are_told_before_weights_change(
    worlds: WorldPool, world: int, nodes: str, zero: dict[str, int]
) -> None:
    """Layers of one size: what is matched by its order alone is mixed up without an error."""
    for told in worlds.run(world, on_nodes, nodes, mixed_up, zero, backend=BACKEND):
        assert "as exchange 1 of the step rank 0 began parameters of layers.1" in told
        assert "rank 1 parameters of layers.3" in told
        assert "after 1 steps" in told


def mixed_up(zero: dict[str, int]) -> str:
    engine = branching_engine(3, [EVERY], stage3_param_persistence_threshold=0, **zero)
    train(engine, 1)
    if zero:  # the first gathers after a step are those of all ranks; then they are a node's
        gather(engine, (1, 3))
    gather(engine, (1, 3) if dist.get_rank() == 0 else (3, 1))
    try:
        train(engine, 5)
    except Diverged as error:
        return f"{error}, after {engine.global_steps} steps"
    return "trained"


def gather(engine: Engine, layers: tuple[int, ...]) -> None:
    for number in layers:
        with GatheredParameters(list(engine.module.layers[number].parameters())):
            pass


def test_ranks_that_gather_inside_of_nodes_train_to_the_same_bits_over_it(
    worlds: WorldPool,
) -> None:
    """Each rank leaves out other modules, and takes part in their gathers all the same."""
    (alone,) = worlds.run(1, run, 0, LEFT_OUT, {})
    assert worlds.run(4, run, 3, LEFT_OUT, HPZ, backend=BACKEND) == [alone] * 4


def test_a_script_s_group_without_the_cpu_is_given_one_for_small_exchanges(
    worlds: WorldPool,
) -> None:
    """As `init_process_group("nccl")` leaves it, after the script has made a group of one rank."""
    alone = worlds.run(1, hashes, CLIPPED, "plain", 2)
    assert worlds.run(2, without_cpu, backend="cuda:queued") == alone * 2


@pytest.mark.full
def test_ranks_gather_inside_of_nodes_over_a_script_s_group_without_the_cpu(
    worlds: WorldPool,
) -> None:
    """Rank 0 is in a group more than the others."""
    (alone,) = worlds.run(1, run, 0, LEFT_OUT, {})
    assert worlds.run(4, inside_without_cpu, backend="cuda:queued") == [alone] * 4


def inside_without_cpu() -> Any:
    dist.new_group([0])
    return run(3, LEFT_OUT, HPZ)


def without_cpu() -> list[str]:
    dist.new_group([0])
    return hashes(CLIPPED, "stage0", 2)


# ---- two nodes of two ranks ----

TWO_NODES = Topology(nodes=(2, 2))


def divided(topology: Topology, interrupt: Interrupt | None = None) -> Collectives:
    group = Collectives(interrupt=interrupt)
    group.meet(CPU)
    group.lay_out(topology)
    group.divide(CPU)
    return group


def communicators(group: Collectives) -> list[QueuedGroup]:
    """Of all ranks, between nodes and inside of the node."""
    parts = group.transports.of(CPU)._parts
    assert parts is not None
    found = [dist.group.WORLD, parts.between, parts.inside]
    return [each for each in found if isinstance(each, QueuedGroup)]


def gathered_in_parts() -> Any:
    """Gathers under way at once, waited for from the last to the first, and what was issued."""
    group = divided(TWO_NODES)
    lanes = communicators(group)
    before = [len(lane.issued) for lane in lanes]
    wholes = [torch.zeros(4, size) for size in (1, 3000, 2)]
    for number, whole in enumerate(wholes):
        group.own(whole.view(-1)).fill_(10 * number + group.rank)
    begun = [group.all_gather(each.view(-1), f"unit {n}") for n, each in enumerate(wholes)]
    for pending in reversed(begun):
        wait(pending)
    owners = [whole.mean(1).tolist() for whole in wholes]
    return owners, [lane.issued[n:] for lane, n in zip(lanes, before, strict=True)]


def test_shards_travel_to_each_node_once_and_then_inside_of_it(worlds: WorldPool) -> None:
    """In communicators of their own, in one order; shards lie in the order of their owners."""
    owners = [[0.0, 2.0, 1.0, 3.0], [10.0, 12.0, 11.0, 13.0], [20.0, 22.0, 21.0, 23.0]]
    issued = [[], ["all_gather"] * 3, ["all_gather"] * 3]
    assert worlds.run(4, gathered_in_parts, backend=BACKEND) == [(owners, issued)] * 4


def shared_in_parts(nodes: tuple[int, ...]) -> list[float]:
    """What ranks 0 and 3 give to all."""
    group = divided(Topology(nodes=nodes))
    rows = {0: torch.zeros(3), 3: torch.zeros(5)}
    if group.rank in rows:
        rows[group.rank].fill_(group.rank + 1)
    wait(group.share(rows, "whole parameters"))
    return torch.cat([rows[0], rows[3]]).tolist()


@pytest.mark.parametrize("nodes", [(2, 2), (3, 1)])
def test_what_some_ranks_give_to_all_is_passed_on_inside_of_nodes(
    worlds: WorldPool, nodes: tuple[int, ...]
) -> None:
    found = worlds.run(4, shared_in_parts, nodes, backend=BACKEND)
    assert found == [[1.0] * 3 + [4.0] * 5] * 4


def test_on_two_nodes_every_stage_trains_to_the_bits_of_one_rank(worlds: WorldPool) -> None:
    cases = [(0, "bf16", 8), (1, "fp32", 4), (3, "bf16", 8)]
    wanted = [digest(expected(dtype, block)) for _, dtype, block in cases]
    assert worlds.run(4, hashes_of_cases, "2,2", "0", cases, backend=BACKEND) == [wanted] * 4


def left_while_it_waits() -> bool | None:
    """A gather in which rank 3 does not take part, and whether this rank gets out of its group."""
    interrupt = Interrupt()
    group = divided(TWO_NODES, interrupt)
    if group.rank == 3:
        return None
    whole = torch.zeros(8)
    pending = group.all_gather(whole, "weights")
    threading.Timer(0.1, interrupt.request, ("a node is lost",)).start()
    with pytest.raises(LeavingNow, match="weights: asked to leave: a node is lost"):
        wait(pending)
    return leave_group()


def test_a_rank_leaves_a_gather_that_a_lost_rank_never_begins(worlds: WorldPool) -> None:
    """Those that wait for it directly, and those that wait for a rank which does."""
    assert worlds.run(4, left_while_it_waits, backend=BACKEND) == [True, True, True, None]


# ---- failures, leaving, lifetime ----


def lose_a_peer_quietly(root: str, stage: int, where: str, zero: dict[str, int]) -> None:
    """Rank 2 is killed; nobody notices, until the agents of the others tell them to leave."""
    rank = dist.get_rank()
    with under_agent(root):
        engine = make_engine(config(stage, zero_optimization={"stage": stage, **zero}))
    train(engine, 1)
    peers = pids()
    if rank != 2:
        threading.Thread(target=_told, args=(engine, peers[2]), daemon=True).start()
    else:
        die_in(engine, where)
    code = exit_code_of(engine, lambda: train(engine, 3))
    Path(root, f"rank{rank}").write_text(f"{code} {dist.is_initialized()}")


def _told(engine: Engine, peer: int) -> None:
    """What the agent's message does, once it has seen the death."""
    wait_for(lambda: not alive(peer), 60, "the death of the peer")
    engine._link.interrupt.request("a node is lost")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("world", "stage", "where", "zero"),
    [
        (3, 0, "backward", {}),
        (3, 2, "step", {}),
        (3, 3, "forward", {}),
        (3, 3, "backward", {}),
        (4, 3, "backward", HPZ),
    ],
)
@pytest.mark.corners(world=[3], stage=[3], where=["backward"])
def test_survivors_that_wait_for_a_killed_peer_abort_their_group_and_leave(
    worlds: WorldPool, tmp_path: Path, world: int, stage: int, where: str, zero: dict[str, int]
) -> None:
    """Those that wait for it in the group of all, and those in the group of its node."""
    job = (lose_a_peer_quietly, str(tmp_path), stage, where, zero)
    with pytest.raises(WorldError, match="rank 2 died, exit -9"):
        worlds.run(world, *job, backend=BACKEND)
    survivors = [rank for rank in range(world) if rank != 2]
    told = [(tmp_path / f"rank{rank}").read_text() for rank in survivors]
    assert told == [f"{int(ExitCode.PEER_LOST)} False"] * len(survivors)


def abort_and_found_again(store_port: int) -> Any:
    """A rank whose group hangs, and which then trains in another."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:  # the others never begin it
        dist.all_gather_into_tensor(torch.zeros(world), torch.zeros(1), async_op=True)
    leave_group()
    store = dist.TCPStore("127.0.0.1", store_port, is_master=False)
    dist.init_process_group(BACKEND, store=store, rank=rank, world_size=world)
    return hashes(CLIPPED, "stage2", 1)


def test_a_group_that_hangs_is_aborted_and_another_founded_in_the_same_process(
    worlds: WorldPool,
) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (alone,) = worlds.run(1, hashes, CLIPPED, "plain", 1)
    found = worlds.run(2, abort_and_found_again, store.port, backend=BACKEND)
    assert found == [alone] * 2


def test_all_ranks_leave_at_the_same_boundary_over_it(worlds: WorldPool, tmp_path: Path) -> None:
    ranks = worlds.run(3, drained, str(tmp_path), "stage3", "directory known", backend=BACKEND)
    assert [rank[:3] for rank in ranks] == [(ExitCode.LEFT, 3, [Left(round=ROUND, step=3)])] * 3


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.corners(stage=[3])
def test_an_engine_that_is_let_go_of_leaves_no_memory_behind_over_it(
    worlds: WorldPool, tmp_path: Path, stage: int
) -> None:
    found = worlds.run(2, left_over, stage, stage > 1, str(tmp_path), backend=BACKEND)
    assert found == [0, 0]


CASES = list(itertools.product((0, 1, 2, 3), ("fp32", "bf16"), (4, 8)))


@pytest.mark.full
@pytest.mark.parametrize("nodes", ["4", "2,2", "1,2,1"])
def test_every_case_of_the_reduction_gives_the_same_bits_over_it(
    worlds: WorldPool, nodes: str
) -> None:
    wanted = [digest(expected(dtype, block)) for _, dtype, block in CASES]
    found = worlds.run(4, hashes_of_cases, nodes, "0", CASES, backend=BACKEND, deadline_s=300)
    assert found == [wanted] * 4


# ---- devices that only gloo connects ----


def staged_and_direct() -> list[Any]:
    """The same exchanges through host memory and directly: what differs."""
    found = []
    for transport in (None, StagedTransport):
        group = Collectives()
        if transport is not None:
            group.transports._by_kind["cpu"] = transport(None, group.rank, group.world, CPU)
        group.meet(CPU)
        full = torch.arange(group.world * 3.0) * (group.rank + 1)
        into = torch.zeros((group.world - 1) * 3)
        wait(group.exchange_gradients(full, into, "gradients"))
        whole = torch.zeros(group.world * 2)
        group.own(whole).fill_(group.rank)
        wait(group.all_gather(whole, "weights"))
        piece = torch.zeros(2)
        right, left = (group.rank + 1) % group.world, (group.rank - 1) % group.world
        wait(group.exchange_pieces({right: whole[:2] + group.rank}, {left: piece}, "pieces"))
        same = torch.full((2,), float(group.rank))
        group.broadcast(same, "a broadcast", 1)
        summed, own = full.clone(), torch.zeros(3)
        wait(group.reduce_scatter(full, own, "sums"))
        wait(group.all_reduce(summed, "sums of all"))
        tensors = (into, whole, piece, same, own, summed)
        found.append([each.tolist() for each in tensors])
    return found


def test_what_travels_through_host_memory_is_what_travels_directly(worlds: WorldPool) -> None:
    for direct, staged in worlds.run(3, staged_and_direct):
        assert staged == direct


# ---- stock PyTorch ----


def groups(wrapper: str) -> int:
    before = len(dist.distributed_c10d._world.pg_names)
    normed(wrapper)
    return len(dist.distributed_c10d._world.pg_names) - before


def test_gradients_of_fsdp2_have_a_communicator_of_their_own_where_order_matters(
    worlds: WorldPool,
) -> None:
    """Otherwise each exchange of gradients would hold up the gather of the next weights."""
    assert worlds.run(2, groups, "fsdp2", backend=BACKEND) == [1, 1]
    assert worlds.run(2, groups, "fsdp2") == [0, 0]
    assert worlds.run(2, groups, "ddp", backend=BACKEND) == [0, 0]
