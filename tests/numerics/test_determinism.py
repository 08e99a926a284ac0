"""`elastic.deterministic`: what does not repeat itself is named or refused; nothing changes."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.numerics.test_stock_torch import batches, protected
from tests.support.models import TinyGPT
from tests.support.training import config, make_engine, train
from tests.support.world import WorldError, WorldPool, forkserver, one_result
from zero_comm import determinism

STAGES = (0, 1, 2, 3)


@contextmanager
def strict(mode: str = "error", **more: Any) -> Iterator[dict[str, Any]]:
    """A config that asks for it; afterwards torch is as it was: ranks serve other tests, too."""
    try:
        yield {"elastic": {"deterministic": mode, **more}}
    finally:
        torch.use_deterministic_algorithms(False)


# ---- the self-test ----


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.corners(stage=[3])
def test_a_run_that_replays_its_first_micro_batch_has_the_bits_of_one_that_does_not(
    worlds: WorldPool, stage: int
) -> None:
    (plain,) = worlds.run(1, train_model, stage, "off")
    assert one_result(worlds, train_model, stage, "error", sizes=(1, 3)) == plain


def train_model(stage: int, mode: str) -> tuple[str, int]:
    """The weights, and how often the first block has run forward in a step of this rank."""
    calls: list[None] = []
    with strict(mode) as settings:
        engine = make_engine(config(stage, **settings))
        engine.module.blocks[0].register_forward_hook(lambda *_: calls.append(None))
        train(engine, 2)
    micro_steps = {1: 5, 3: 2}[engine.world_size]
    replays = 2 if mode == "error" else 0
    assert len(calls) == 2 * micro_steps + replays
    return engine.weight_hash(), engine.global_samples


class Drifting(nn.Module):
    """Keeps state that is no buffer; so it does not repeat itself, forward or backward."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.where == "forward":
            return x + self.calls / 64
        if self.where == "backward" and x.requires_grad:
            x.register_hook(lambda gradient: gradient * (1 + self.calls / 64))
        return x


STOCK: list[tuple[str, tuple[int, ...], dict[str, Any]]] = [
    ("plain", (1,), {}),
    ("plain", (1,), {"reentrant": True}),
    ("ddp", (1, 2), {}),
    ("ddp", (2,), {"static_graph": True}),
    ("ddp", (2,), {"static_graph": True, "reentrant": True}),
    ("ddp", (2,), {"find_unused_parameters": True}),
    ("ddp", (2,), {"reentrant": True}),
    ("fsdp2", (1, 2), {}),
    ("fsdp2", (2,), {"reentrant": True}),
    ("fsdp2", (2,), {"reentrant": False}),
    ("fsdp2", (2,), {"param_dtype": torch.bfloat16}),
    ("columns", (2,), {}),
    ("hsdp", (4,), {}),
]
"""Each way to wrap a model, worlds, and options of `stock.make`."""


@pytest.mark.parametrize(("wrapper", "sizes", "options"), STOCK, ids=str)
@pytest.mark.corners(wrapper=["ddp", "hsdp"], options=[{}])
def test_stock_pytorch_has_the_same_bits_with_a_replay(
    worlds: WorldPool, wrapper: str, sizes: tuple[int, ...], options: dict[str, Any]
) -> None:
    plain = one_result(worlds, train_stock, wrapper, "off", options, sizes=sizes)
    assert one_result(worlds, train_stock, wrapper, "error", options, sizes=sizes) == plain


def train_stock(wrapper: str, mode: str, options: dict[str, Any]) -> str:
    """The weights after two steps; a test runs the first block forward two times more."""
    calls: list[None] = []
    with strict(mode) as settings:
        model, _, run = protected(wrapper, config=settings, **options)
        (block,) = (each for name, each in model.named_modules() if name.endswith("blocks.0"))
        block.register_forward_pre_hook(lambda *_: calls.append(None))
        for number, tokens in enumerate(batches(run, 2)):
            loss = model(tokens)
            assert len(calls) == number + (3 if mode == "error" else 1)
            run.backward(loss)
            run.step()
    return run.weight_hash()


@pytest.mark.parametrize("by", [0, 3, "plain", "ddp", "fsdp2", "hsdp"])
@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("forward", "the output of module 'blocks.1.drop' differs first, on rank 0"),
        ("backward", "in the order of backward first that of 'blocks.1"),
    ],
)
@pytest.mark.corners(by=[3, "fsdp2"])
def test_what_does_not_repeat_itself_is_named_before_weights_change(
    worlds: WorldPool, where: str, by: int | str, says: str
) -> None:
    world = {"plain": 1, "hsdp": 4}.get(str(by), 2)
    with pytest.raises(WorldError) as raised:
        worlds.run(world, train_drifting, where, by, "error")
    assert says in str(raised.value)
    assert "ZeroError: the first micro-batch has other bits when it is run again" in str(
        raised.value
    )
    assert worlds.run(world, train_drifting, where, by, "warn") == [1] * world


def train_drifting(where: str, by: int | str, mode: str) -> int:
    """Steps by a stage of the engine, or by a wrapper of stock PyTorch."""
    drifting = Drifting(where)
    with strict(mode) as settings:
        if isinstance(by, str):
            model, _, run = protected(by, config=settings)
            (block,) = (each for name, each in model.named_modules() if name.endswith("blocks.1"))
            block.drop = drifting
            for tokens in batches(run, 1):
                run.backward(model(tokens))
                run.step()
            return run.global_step
        torch.manual_seed(0)
        model = TinyGPT()
        model.blocks[1].drop = drifting  # type: ignore[union-attr]
        engine = make_engine(config(by, **settings), model=model)
        train(engine, 1)
    return engine.global_steps


# ---- kernels ----


class Putting(TinyGPT):
    """Uses an operator that torch has no deterministic kernel for."""

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens.put_(torch.tensor([0]), torch.tensor([1]))
        return super().forward(tokens)


def test_an_operator_without_a_deterministic_kernel_is_named_with_the_remedy(
    worlds: WorldPool,
) -> None:
    (text,) = worlds.run(1, put)
    assert text == (
        'elastic.deterministic is "error", and put_ has no kernel that repeats itself here; use '
        'another operator, or set elastic.deterministic to "warn", and the bits may differ from '
        "run to run"
    )


def put() -> str:
    from zero_contract.errors import ZeroError

    with strict() as settings:
        engine = make_engine(config(0, **settings), model=Putting())
        try:
            train(engine, 1)
        except ZeroError as error:
            return str(error)
    return "no error"


# ---- hardware ----


def test_a_mix_of_hardware_is_named_or_refused(worlds: WorldPool) -> None:
    mixed = "the ranks do not compute on the same: torch's number of threads is 1 on rank 0, 2 on "
    (lines, none) = worlds.run(2, mix, "warn")
    assert [line[: len(mixed)] for line in lines] == [mixed]
    assert none == []
    assert worlds.run(2, mix, "off") == [[], []]
    assert worlds.run(2, mix, "warn", True) == [lines, []]
    with pytest.raises(
        WorldError, match=r'ConfigError: elastic\.deterministic is "error", and the '
    ):
        worlds.run(2, mix, "error")


def mix(mode: str, stock: bool = False, threads: int = 0) -> list[str]:
    """The warnings of a rank, each of which has another number of threads, or this one."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or 1 + int(torch.distributed.get_rank()))
    try:
        with warned() as lines, strict(mode) as settings:
            if stock:
                protected("ddp", config=settings)
            else:
                make_engine(config(0, **settings))
    finally:
        torch.set_num_threads(before)
    return lines


@contextmanager
def warned() -> Iterator[list[str]]:
    """What is logged about what the ranks compute on."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("zero_comm.determinism")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


LATER = "the ranks do not compute on the same: torch's number of threads is 2 on rank 0, 1 on "


@pytest.mark.parametrize("kind", ["engine", "plain", "ddp", "fsdp2"])
@pytest.mark.corners(kind=["ddp"])
def test_a_rank_that_a_script_switches_while_it_trains_is_named_after_that_step(
    worlds: WorldPool, kind: str
) -> None:
    for world in (2,) if kind != "plain" else (1,):
        found, *others = worlds.run(world, switch_later, kind, "warn")
        others_of = {1: "", 2: "rank 1"}[world]
        after = [] if world == 1 else [LATER + others_of]
        assert [(step, line.partition(";")[0]) for step, line in found] == [
            (2, line) for line in after
        ]
        assert others == [[]] * (world - 1)
        assert worlds.run(world, switch_later, kind, "off") == [[]] * world
    if kind != "plain":
        with pytest.raises(WorldError, match=rf'deterministic is "error", and {LATER}rank 1\.'):
            worlds.run(2, switch_later, kind, "error")


def switch_later(kind: str, mode: str) -> list[tuple[int, str]]:
    """The warnings of a rank, with the steps done; rank 0 gets a second thread in the second.

    A rank that ends its steps within autocast's block is none that is switched.
    """
    rank, before = torch.distributed.get_rank(), torch.get_num_threads()
    found: list[tuple[int, str]] = []

    def note(steps: int) -> None:
        if steps == 1:
            torch.set_num_threads(2 if rank == 0 else 1)
        found.extend((steps, line) for line in lines)
        lines.clear()

    torch.set_num_threads(1)
    try:
        with warned() as lines, strict(mode) as settings:
            if kind == "engine":
                engine = make_engine(config(3, **settings))
                for steps in range(1, 5):
                    with torch.autocast("cpu", torch.bfloat16, enabled=rank == 1 and steps == 3):
                        train(engine, steps)
                    note(steps)
                return found
            model, _, run = protected(kind, config=settings)
            for tokens in batches(run, 4):
                with torch.autocast("cpu", torch.bfloat16, enabled=rank == 1):
                    run.backward(model(tokens))
                    run.step()
                note(run.global_step)
    finally:
        torch.set_num_threads(before)
    return found


_BACKENDS = torch.backends
SWITCHES: dict[str, tuple[Callable[[], object], str, str]] = {
    "autocast": (lambda: torch.set_autocast_enabled("cpu", True), "autocast", ""),
    "autocast on a device": (lambda: torch.set_autocast_enabled("cuda", True), "", "autocast"),
    "oneDNN": (lambda: setattr(_BACKENDS.mkldnn, "enabled", False), "no oneDNN", ""),
    "cuDNN": (lambda: setattr(_BACKENDS.cudnn, "enabled", False), "", "no cuDNN"),
    "denormals": (lambda: torch.set_flush_denormal(True), "no denormals", ""),
    "a variable": (lambda: os.environ.update(MKL_CBWR="AVX2"), "MKL_CBWR=AVX2", "MKL_CBWR=AVX2"),
    "the older way": (
        lambda: torch.set_float32_matmul_precision("high"),
        "matmul precision high",
        "matmul precision high",
    ),
    "the newer way": (
        lambda: setattr(_BACKENDS.cuda.matmul, "fp32_precision", "tf32"),
        "",
        "matmul precision high",
    ),
    "the newer way on a CPU": (
        lambda: setattr(_BACKENDS.mkldnn.matmul, "fp32_precision", "bf16"),
        "matmul precision medium",
        "",
    ),
    "convolutions": (
        lambda: setattr(_BACKENDS.cudnn.conv, "fp32_precision", "ieee"),
        "",
        "convolution precision highest",
    ),
    "convolutions on a CPU": (
        lambda: setattr(_BACKENDS.mkldnn.conv, "fp32_precision", "tf32"),
        "convolution precision high",
        "",
    ),
    "all": (
        lambda: setattr(_BACKENDS, "fp32_precision", "tf32"),
        "matmul precision high, convolution precision high, recurrence precision high",
        "matmul precision high",
    ),
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_what_a_script_switches_in_torch_is_in_the_record_of_what_computes(switch: str) -> None:
    with forkserver().Pool(1) as pool:  # a process of its own: not all can be taken back
        assert pool.apply(switched, (switch,)) == SWITCHES[switch][1:]


def switched(switch: str) -> tuple[str, ...]:
    """What the record of a CPU and that of a device have with a switch alone."""
    before, _, after = records(), SWITCHES[switch][0](), records()
    pairs = zip(before, after, strict=True)
    return tuple(", ".join(each for each in now if each not in then) for then, now in pairs)


def records() -> list[list[str]]:
    return [determinism._kernels(on_device=where).split(", ") for where in (False, True)]


def test_a_torch_without_the_newer_words_tells_the_precision_of_its_matrix_products() -> None:
    class Older:
        """As `torch.backends.cuda` and `.cudnn` before torch 2.9."""

        matmul = object()

    assert determinism._precision(Older, "matmul") == torch.get_float32_matmul_precision()
    assert determinism._precision(Older, "conv") == ""


def test_ranks_that_compute_in_other_ways_are_named(worlds: WorldPool) -> None:
    (lines, none) = worlds.run(2, mix_of_kernels)
    assert none == []
    assert [line.partition(";")[0] for line in lines] == [
        "the ranks do not compute on the same: the choice of kernels is deterministic, matmul "
        "precision highest on rank 0, deterministic, matmul precision highest, no oneDNN on rank 1"
    ]


def mix_of_kernels() -> list[str]:
    with torch.backends.mkldnn.flags(enabled=torch.distributed.get_rank() == 0):
        return mix("warn", threads=1)


def test_a_resume_on_other_hardware_is_refused_and_the_manifest_says_what_it_was(
    worlds: WorldPool, tmp_path: Path
) -> None:
    worlds.run(1, save, str(tmp_path))
    (manifest,) = tmp_path.glob("step-*/MANIFEST.json")
    (record,) = json.loads(manifest.read_text())["meta"]["engine"]["hardware"]
    assert record["threads"] == 1
    assert record["torch"] == torch.__version__
    assert record["kernels"] == "deterministic, matmul precision highest"
    assert record["processor"]
    assert worlds.run(1, resume, str(tmp_path), "error", 1) == [1]
    assert worlds.run(1, resume, str(tmp_path), "warn", 2) == [1]
    with pytest.raises(WorldError, match=r"number of threads is 2 and was 1\. Results would"):
        worlds.run(1, resume, str(tmp_path), "error", 2)


def save(directory: str) -> None:
    with strict("warn") as settings:
        engine = make_engine(config(0, **settings))
        train(engine, 1)
        engine.save_checkpoint(directory)


def resume(directory: str, mode: str, threads: int) -> int:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with strict(mode) as settings:
            engine = make_engine(config(0, **settings))
            engine.load_checkpoint(directory)
            return engine.global_steps
    finally:
        torch.set_num_threads(before)
