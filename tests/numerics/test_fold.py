"""Additions as one pass: the bits of doing them one by one, or no kernel."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, fx
from torch.utils.flop_counter import FlopCounterMode

from zero_comm.sums.additions import TOTAL, Addition, Memory, run_one_by_one
from zero_comm.sums.buffer_pool import BufferPool
from zero_comm.sums.fold import Fold, graph_of
from zero_comm.sums.ordered_sum import Progress, next_pieces, next_sums

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Additions = tuple[Addition, ...]
Run = Callable[[Additions, dict[Memory, Tensor]], None]


def lists() -> Iterator[Additions]:
    """What owners and senders add: one to eight gradients at a time, from anywhere in a block."""
    for block in (1, 2, 4, 8):
        for begin in range(2 * block):
            progress = Progress()
            if begin:
                _, progress = next_sums(progress, (0,) * begin, block, last=False)
            for count in range(1, 9):
                for last in (False, True):
                    yield next_sums(progress, (0,) * count, block, last=last)[0]
                yield next_pieces(begin, count, block)[0]


ALL = [additions for additions in dict.fromkeys(lists()) if additions]


def numbers(seed: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Of sizes between which sums round, with infinities, and numbers below the normal ones."""
    draw = torch.Generator().manual_seed(seed)
    found = torch.randn(numel, generator=draw) * 10.0 ** (seed % 5)
    found[::7] = 1e-41 * seed
    found[seed % 5 :: 211] = torch.inf
    return found.to(dtype)


def check(run: Run, additions: Additions, dtype: torch.dtype, numel: int, shared: bool) -> None:
    """`shared`: the total lies where the first gradient does."""
    names = dict.fromkeys(each for addition in additions for each in addition if each)
    ours, theirs = (
        {
            name: numbers(seed, numel, dtype if name.kind == "given" else torch.float32)
            for seed, name in enumerate(names)
        }
        for _ in range(2)
    )
    given = Memory("given", 0)
    if shared and dtype == torch.float32 and TOTAL in names and given in names:
        ours[given], theirs[given] = ours[TOTAL], theirs[TOTAL]
    run(additions, ours)
    run_one_by_one(additions, theirs, torch.float32, BufferPool(CPU))
    for name in {target for target, *_ in additions if target.kind != "given"}:
        assert torch.equal(bits(ours[name]), bits(theirs[name]))


def bits(numbers: Tensor) -> Tensor:
    return torch.where(numbers.isnan(), torch.nan, numbers).view(torch.int32)


def begins(additions: Additions) -> bool:
    """Whether nothing is read of the total before it is written."""
    return next(TOTAL not in (left, right) for target, left, right in additions if target == TOTAL)


def as_a_graph(additions: Additions, memory: dict[Memory, Tensor]) -> None:
    at: dict[int, int] = {}
    named = [
        (name, at.setdefault(tensor.data_ptr(), len(at)), tensor.dtype)
        for name, tensor in memory.items()
    ]
    graph = graph_of(additions, named, torch.float32)
    assert isinstance(graph, fx.GraphModule)
    graph(*{number: memory[name] for name, number, _ in named}.values())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_graph_of_additions_has_the_bits_of_doing_them_one_by_one(dtype: torch.dtype) -> None:
    """All lists of up to eight pieces."""
    for additions in ALL:
        starts = any(target == TOTAL for target, *_ in additions) and begins(additions)
        check(as_a_graph, additions, dtype, 64, shared=starts)


def kind(additions: Additions) -> tuple[int, bool]:
    """How many are given, and whether a sum is there before."""
    read = {each for _, *both in additions for each in both if each}
    return sum(each.kind == "given" for each in read), TOTAL in read


def compiled(fold: Fold) -> Run:
    return lambda additions, memory: fold.run(additions, memory, torch.float32, BufferPool(CPU))


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler uses torch.jit
def test_a_compiled_list_is_one_kernel_for_every_length_with_the_same_bits() -> None:
    """Eight gradients in bf16, by the compiler that makes the kernels of a GPU."""
    from torch._dynamo.utils import counters
    from torch._inductor import metrics

    additions, _ = next_sums(Progress(), (0,) * 8, 8, last=False)
    fold = Fold()
    counters.clear()
    metrics.reset()
    for numel in (1024, 3 * 1024, 1 << 16, 5 * 1024, 7):
        check(compiled(fold), additions, torch.bfloat16, numel, shared=False)
    assert len(fold.kernels) == 1
    assert metrics.generated_kernel_count == 1
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_compiled_list_has_the_bits_of_doing_them_one_by_one(dtype: torch.dtype) -> None:
    """One to eight pieces, at the beginning of a sum and later."""
    fold, some = Fold(), list({kind(additions): additions for additions in ALL}.values())
    for additions in some:
        starts = any(target == TOTAL for target, *_ in additions) and begins(additions)
        check(compiled(fold), additions, dtype, 3 * 1024, shared=starts)
    assert len(fold.kernels) >= len(some)  # where the total lies makes two of one


def test_what_cannot_be_compiled_is_added_one_by_one_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    additions, _ = next_sums(Progress(), (0,) * 3, 8, last=False)
    fold = Fold(backend="no such compiler")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            check(compiled(fold), additions, torch.bfloat16, 64, shared=False)
    (record,) = caplog.records
    assert "gradients are added one by one" in record.getMessage()
    assert "no such compiler" in record.getMessage()


def test_under_a_counter_of_operations_each_addition_is_done_once() -> None:
    """torch compiles nothing there; config key "flops_profiler" counts the operations of a step."""
    fold, begun = Fold(backend="eager"), next_sums(Progress(), (0,) * 8, 8, last=False)[1]
    additions, _ = next_sums(begun, (0,) * 8, 8, last=False)
    assert Addition(TOTAL, TOTAL, Memory("given", 0)) in additions
    for context in (nullcontext(), FlopCounterMode(display=False)):
        with context:
            check(compiled(fold), additions, torch.bfloat16, 64, shared=False)
    assert not fold.is_broken


def test_a_kernel_with_other_bits_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    """One that adds nothing."""
    additions, _ = next_sums(Progress(), (0,) * 3, 8, last=False)
    fold = Fold(backend=lambda _graph, _inputs: lambda *_: ())
    with caplog.at_level(logging.WARNING):
        check(compiled(fold), additions, torch.float32, 64, shared=False)
    assert "gives other bits on this device" in caplog.text
    assert not fold.kernels


def test_a_kernel_that_fails_while_it_writes_is_an_error_and_nothing_is_added_twice() -> None:
    """Its device has run out of memory, say: which additions it has done, nobody knows."""
    runs: list[int] = []

    def backend(graph: fx.GraphModule, _inputs: list[Tensor]) -> Callable[..., object]:
        def kernel(*inputs: Tensor) -> object:
            runs.append(len(runs))
            done = graph(*inputs)
            if len(runs) > 1:  # the first run is that on samples
                raise RuntimeError("CUDA out of memory")
            return done

        return kernel

    begun = next_sums(Progress(), (0,) * 8, 8, last=False)[1]
    additions, _ = next_sums(begun, (0,) * 8, 8, last=False)
    assert Addition(TOTAL, TOTAL, Memory("given", 0)) in additions
    fold = Fold(backend=backend)
    with pytest.raises(RuntimeError, match="CUDA out of memory"):
        check(compiled(fold), additions, torch.float32, 64, shared=False)
    assert len(runs) == 2


def test_a_kernel_that_cannot_be_compiled_for_another_length_adds_one_by_one() -> None:
    """torch compiles again for some lengths; what fails there has not written anything."""
    compiles: list[int] = []

    def backend(graph: fx.GraphModule, _inputs: list[Tensor]) -> Callable[..., object]:
        compiles.append(len(compiles))
        if len(compiles) > 1:
            raise ValueError("no kernel of one element")
        return graph.forward

    additions, _ = next_sums(Progress(), (0,) * 3, 8, last=False)
    fold = Fold(backend=backend)
    for numel in (64, 1):
        check(compiled(fold), additions, torch.float32, numel, shared=False)
    assert (len(compiles), fold.is_broken) == (2, True)


def test_lists_beyond_the_bound_are_added_one_by_one() -> None:
    fold = Fold(backend="eager", most=2)
    for count in range(1, 5):
        additions, _ = next_sums(Progress(), (0,) * count, 8, last=False)
        check(compiled(fold), additions, torch.float16, 64, shared=False)
    assert len(fold.kernels) == 2


def test_a_default_device_of_the_script_makes_no_difference() -> None:
    additions, _ = next_sums(Progress(), (0,) * 3, 8, last=False)
    fold = Fold(backend="eager")

    def run(additions: Additions, memory: dict[Memory, Tensor]) -> None:
        with torch.device("meta"):
            compiled(fold)(additions, memory)

    check(run, additions, torch.bfloat16, 64, shared=False)
    assert fold.kernels
