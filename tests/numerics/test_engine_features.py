"""What users of the engine rely on, beside the bits being the same."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.data import Dataset

import zero_engine
from tests.support.models import TinyGPT, Tokens, make_model, param_groups
from tests.support.training import DATASET_SIZE, config, make_engine, train
from tests.support.world import WorldError, WorldPool
from zero_engine.engine import Engine
from zero_engine.ledger import read_ledger, verify

STEPS = 4
STAGES = (0, 1, 2, 3)


def one_result(worlds: WorldPool, job: Any, *args: Any, sizes: tuple[int, ...] = (1, 3)) -> Any:
    """The result of `job`, which must be the same on every rank of every size."""
    results = [result for world in sizes for result in worlds.run(world, job, *args)]
    assert all(result == results[0] for result in results)
    return results[0]


# ---- optimizers and schedules ----


@pytest.mark.parametrize(
    "optimizer",
    [
        {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True}},
        {"type": "Adam", "params": {"lr": 0.01, "adam_w_mode": False}},
        {"type": "Adagrad", "params": {"lr": 0.01, "initial_accumulator_value": 0.1}},
    ],
    ids=lambda optimizer: optimizer["type"],
)
def test_every_elementwise_optimizer_of_the_config_gives_one_result(
    worlds: WorldPool, optimizer: dict[str, Any]
) -> None:
    hashes = one_result(worlds, train_stages, optimizer)
    assert len(set(hashes)) == 1


def train_stages(optimizer: dict[str, Any]) -> list[str]:
    hashes = []
    for stage in STAGES:
        engine = make_engine(config(stage, optimizer=optimizer))
        train(engine, STEPS)
        hashes.append(engine.weight_hash())
    return hashes


def test_the_users_optimizer_stays_the_same_object_and_schedulers_built_on_it_work(
    worlds: WorldPool,
) -> None:
    by_object = one_result(worlds, train_with_own_optimizer, "object", 2)
    by_callable = one_result(worlds, train_with_own_optimizer, "callable", 3)
    assert by_object == by_callable
    _, rates = by_object
    # Two groups, each with its own rate, halved after each of the four steps.
    assert rates == [pytest.approx(1e-2 / 16), pytest.approx(5e-3 / 16)]


def train_with_own_optimizer(how: str, stage: int) -> tuple[str, list[float]]:
    model = make_model()
    settings = config(stage)
    del settings["optimizer"]

    def make(groups: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, lr=1e-2)

    def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    groups = param_groups(model)
    own = make(groups) if how == "object" else make
    scheduler = schedule(own) if isinstance(own, torch.optim.Optimizer) else schedule
    engine, optimizer, _, returned = zero_engine.initialize(
        model=model,
        optimizer=own,
        model_parameters=groups,
        training_data=Tokens(DATASET_SIZE),
        lr_scheduler=scheduler,
        config=settings,
    )
    if how == "object":
        assert optimizer is own
        assert returned is scheduler
    assert engine.optimizer is optimizer
    train(engine, STEPS)
    return engine.weight_hash(), engine.get_lr()


def test_an_optimizer_of_foreign_parameters_is_refused(worlds: WorldPool) -> None:
    with pytest.raises(WorldError, match="is not one of the model's; make the optimizer from"):
        worlds.run(1, initialize_with_foreign_parameters)


def initialize_with_foreign_parameters() -> None:
    settings = config()
    del settings["optimizer"]
    stranger = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    zero_engine.initialize(model=make_model(), optimizer=stranger, config=settings)


def test_a_step_whose_gradients_are_not_finite_is_skipped_on_every_rank(
    worlds: WorldPool,
) -> None:
    for stage in STAGES:
        before, after, *counts = one_result(worlds, skip_a_step, stage, sizes=(1, 2))
        assert before == after
        # Skipped once; the data moved on, the schedule did not; the next step was applied.
        assert counts == [1, False, 20, 1e-2, 1e-2 / 2, 2]


def skip_a_step(stage: int) -> tuple[Any, ...]:
    engine = make_engine(
        config(stage),
        lr_scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, step_size=1, gamma=0.5),
    )
    before = engine.weight_hash()
    loader = engine.training_dataloader
    assert loader is not None
    for batch in loader:
        loss = engine(batch)
        # One leaf, on one rank.
        spoil = engine.global_rank == 0 and engine.micro_steps == 0
        engine.backward(loss * float("inf") if spoil else loss)
        engine.step()
        if engine.global_steps == 1:
            break
    after, skipped = engine.weight_hash(), (engine.skipped_steps, engine.was_step_applied())
    rate = engine.get_lr()[0]
    train(engine, 2)
    return before, after, *skipped, engine.global_samples, rate, engine.get_lr()[0], 2


# ---- the global batch ----


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ghosts_and_the_short_last_step_are_counted_right(worlds: WorldPool, world: int) -> None:
    """23 samples: steps of 10, 10 and 3, in 5, 5 and 2 leaves."""
    expected = {1: [5, 5, 2], 2: [3, 3, 1], 4: [2, 2, 1]}[world]
    assert (
        worlds.run(world, count_micro_steps)
        == [(expected, [10, 20, 23, 33], sum(expected), [0, 0, 1, 1])] * world
    )


def count_micro_steps() -> tuple[Any, ...]:
    engine = make_engine(config(2))
    loader = engine.training_dataloader
    per_step, positions, epochs, length = [], [], [], len(loader)
    while len(positions) < 4:
        for batch in loader:
            boundary, before = engine.is_gradient_accumulation_boundary(), engine.global_steps
            engine.backward(engine(batch))
            engine.step()
            assert boundary == (engine.global_steps > before)
            if boundary:
                per_step.append(engine.micro_steps - sum(per_step))
                positions.append(engine.global_samples)
                epochs.append(loader.epoch)
            if len(positions) == 4:
                break
    return per_step[:3], positions, length, epochs


def test_a_loop_that_is_left_and_entered_again_goes_on_where_it_was(worlds: WorldPool) -> None:
    """Even in the middle of a step, and with batches prefetched by worker processes."""
    assert one_result(worlds, train_in_fragments, 0) == one_result(worlds, train_in_one_go, 2)


def train_in_fragments(num_workers: int) -> str:
    engine = make_engine(config(2), num_workers=num_workers)
    while engine.global_steps < STEPS:
        batch = next(iter(engine.training_dataloader))
        engine.backward(engine(batch))
        engine.step()
    return engine.weight_hash()


def train_in_one_go(num_workers: int) -> str:
    engine = make_engine(config(2), num_workers=num_workers)
    train(engine, STEPS)
    return engine.weight_hash()


def test_the_tail_of_an_epoch_is_dropped_on_request(worlds: WorldPool) -> None:
    assert worlds.run(2, count_dropped) == [(2, 20, 30)] * 2


def count_dropped() -> tuple[int, int, int]:
    engine = make_engine(config(1, dataloader_drop_last=True))
    for batch in engine.training_dataloader:
        engine.backward(engine(batch))
        engine.step()
    first = engine.global_steps, engine.global_samples
    train(engine, 3)
    return *first, engine.global_samples


class Noisy(Dataset[Tensor]):
    """Samples with augmentation: random numbers drawn while loading."""

    def __len__(self) -> int:
        return DATASET_SIZE

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(4) + index


def test_random_augmentation_does_not_depend_on_who_loads_a_sample(worlds: WorldPool) -> None:
    assert one_result(worlds, train_on_noise, 0) == one_result(worlds, train_on_noise, 1)


def train_on_noise(num_workers: int) -> str:
    torch.manual_seed(0)
    engine, _, loader, _ = zero_engine.initialize(
        model=nn.Linear(4, 1),
        training_data=Noisy(),
        config=config(2),
        num_workers=num_workers,
    )
    for batch in loader:
        engine.backward(engine(batch).square().mean())
        engine.step()
    return engine.weight_hash()


def test_data_of_the_users_own_works_without_our_loader(worlds: WorldPool) -> None:
    """Every rank feeds its leaves; full steps, each leaf weighted alike."""
    assert len(one_result(worlds, train_on_own_data, sizes=(1, 2, 4))) == 64


def train_on_own_data() -> str:
    torch.manual_seed(0)
    engine, _, loader, _ = zero_engine.initialize(model=nn.Linear(4, 1), config=config(1))
    assert loader is None
    rank, world, leaves = engine.global_rank, engine.world_size, 5
    for step in range(3):
        for micro in range(engine.gradient_accumulation_steps()):
            leaf = min(micro * world + rank, leaves - 1)
            batch = torch.full((2, 4), float(step + leaf))
            engine.backward(engine(batch).square().mean())
            engine.step()
    assert engine.global_samples == 30
    return engine.weight_hash()


# ---- models ----


class Branching(nn.Module):
    """Skips a block when the first token is even: which ranks do depends on their samples."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(131, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).mean(1)
        for number, block in enumerate(self.blocks):
            if number != 1 or tokens[0, 0] % 2:
                x = F.gelu(block(x))
        return x.square().mean()


def test_a_branch_that_only_some_ranks_take_does_not_desynchronise_them(
    worlds: WorldPool,
) -> None:
    assert len(set(one_result(worlds, train_branching, sizes=(1, 2, 3)))) == 1


def train_branching() -> list[str]:
    hashes = []
    for stage in (0, 1, 2):
        torch.manual_seed(0)
        engine, *_ = zero_engine.initialize(
            model=Branching(), training_data=Tokens(DATASET_SIZE), config=config(stage)
        )
        train(engine, STEPS)
        hashes.append(engine.weight_hash())
    return hashes


class Checkpointed(TinyGPT):
    """Recomputes its blocks in backward; all of them, or as far as their inputs are needed."""

    early_stop = True

    def forward(self, tokens: Tensor) -> Tensor:
        plain = list(self.blocks)
        x = self.embed(tokens[:, :-1]) + self.position
        with set_checkpoint_early_stop(self.early_stop):
            x = checkpoint(lambda y: plain[1](plain[0](y)), x, use_reentrant=False)
        logits = self.head(self.norm(x)).float() * self.temperature[0, 0]
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class FullyCheckpointed(Checkpointed):
    early_stop = False


@pytest.mark.parametrize("name", ["Checkpointed", "FullyCheckpointed"])
def test_activation_checkpointing_changes_nothing_at_any_stage(
    worlds: WorldPool, name: str
) -> None:
    plain = one_result(worlds, train_class, "TinyGPT", (0,))
    recomputed = one_result(worlds, train_class, name, (0, 2, 3))
    assert set(recomputed) == set(plain)


def train_class(name: str, stages: tuple[int, ...]) -> list[str]:
    hashes = []
    for stage in stages:
        torch.manual_seed(7)
        model = globals()[name]()
        engine, *_ = zero_engine.initialize(
            model=model,
            model_parameters=param_groups(model),
            training_data=Tokens(DATASET_SIZE),
            config=config(stage),
        )
        train(engine, STEPS)
        hashes.append(engine.weight_hash())
    return hashes


def test_on_a_frozen_model_stage_3_gives_the_same_bits_and_frees_what_backward_has_passed(
    worlds: WorldPool,
) -> None:
    hashes, seen = one_result(worlds, train_norms_only)
    assert len(set(hashes)) == 1
    assert seen == {"during its backward": True, "after it": False}


def train_norms_only() -> tuple[list[str], dict[str, bool]]:
    """Whether the frozen weights of the last block are there, as seen at two gradients."""
    hashes, seen = [], {}
    for stage in STAGES:
        model = make_model()
        for name, param in model.named_parameters():
            param.requires_grad_("norm" in name)
        engine = make_frozen_engine(model, stage)
        frozen = next(u for u in engine._core.units if u.name == "blocks.1 (untrained, float32)")

        def look(when: str, _gradient: Tensor, frozen: Any = frozen) -> None:
            seen[when] = frozen.gathered

        model.blocks[1].norm2.weight.register_hook(partial(look, "during its backward"))
        model.blocks[0].norm1.weight.register_hook(partial(look, "after it"))
        train(engine, STEPS)
        hashes.append(engine.weight_hash())
    return hashes, seen


def make_frozen_engine(model: nn.Module, stage: int) -> Engine:
    engine, *_ = zero_engine.initialize(
        model=model, training_data=Tokens(DATASET_SIZE), config=config(stage)
    )
    return engine


def test_evaluation_between_steps_changes_nothing(worlds: WorldPool) -> None:
    assert one_result(worlds, train_and_evaluate, 3) == one_result(worlds, train_in_one_go, 0)


def train_and_evaluate(stage: int) -> str:
    engine = make_engine(config(stage))
    probe = torch.stack([Tokens(3)[i] for i in range(3)])
    for steps in range(1, STEPS + 1):
        train(engine, steps)
        engine.eval()
        with torch.no_grad():
            first = engine(probe)
        assert torch.equal(first, engine(probe).detach())  # with gradients, but no backward
        engine.train()
    return engine.weight_hash()


def test_the_whole_state_dict_is_there_at_every_stage_and_loads_into_the_plain_model(
    worlds: WorldPool,
) -> None:
    for stage in STAGES:
        assert worlds.run(2, state_dict_reproduces_the_loss, stage) == [True, True]


def state_dict_reproduces_the_loss(stage: int) -> bool:
    engine = make_engine(config(stage))
    train(engine, 1)
    plain = make_model(seed=9)
    plain.load_state_dict(engine.module_state_dict())
    probe = torch.stack([Tokens(3)[i] for i in range(3)])
    engine.eval()
    plain.eval()
    with torch.no_grad():
        return torch.equal(engine(probe), plain(probe))


def test_a_stage_3_modules_own_state_dict_is_refused_with_the_remedy(worlds: WorldPool) -> None:
    with pytest.raises(WorldError, match=r"call engine\.module_state_dict\(\) on every rank"):
        worlds.run(1, own_state_dict)


def own_state_dict() -> None:
    make_engine(config(3)).module.state_dict()


def test_weights_are_those_of_rank_0_whatever_the_others_were_made_with(
    worlds: WorldPool,
) -> None:
    alone = worlds.run(1, hash_of_rank_dependent_model)[0]
    assert worlds.run(3, hash_of_rank_dependent_model) == [alone] * 3


def hash_of_rank_dependent_model() -> str:
    rank = torch.distributed.get_rank()
    engine = make_engine(config(2), seed=7 + rank)
    return engine.weight_hash() + str(engine.module.temperature.tolist())


# ---- misuse is named ----


def misuse(kind: str) -> None:
    engine = make_engine(config(2))
    batch = next(iter(engine.training_dataloader))
    loss = engine(batch)
    match kind:
        case "loss.backward":
            loss.backward()
        case "step first":
            engine.step()
        case "backward twice":
            engine.backward(loss)
            engine.backward(loss)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("loss.backward", "gradients outside engine.backward"),
        ("step first", "call engine.backward"),
        ("backward twice", "call engine.step"),
    ],
)
def test_a_call_out_of_order_is_named(worlds: WorldPool, kind: str, message: str) -> None:
    with pytest.raises(WorldError, match=message):
        worlds.run(1, misuse, kind)


def test_bf16_parameters_in_fp32_training_are_refused_with_the_remedy(worlds: WorldPool) -> None:
    with pytest.raises(WorldError, match=r"torch\.bfloat16 in fp32 training; set bf16\.enabled"):
        worlds.run(1, initialize_bf16_model_in_fp32)


def initialize_bf16_model_in_fp32() -> None:
    zero_engine.initialize(model=make_model().bfloat16(), config=config())


# ---- the ledger ----


@contextmanager
def round_number(number: int) -> Iterator[None]:
    os.environ["ZERO_ROUND"] = str(number)
    try:
        yield
    finally:
        del os.environ["ZERO_ROUND"]


def test_over_deaths_and_resizes_every_sample_is_committed_exactly_once(
    worlds: WorldPool, tmp_path: Path
) -> None:
    """Three rounds of 2, 4 and 3 ranks; each but the first repeats steps that were lost."""
    root, ledger = str(tmp_path / "checkpoints"), str(tmp_path / "ledger")
    for number, (world, save_at, steps) in enumerate([(2, 2, 4), (4, 5, 6), (3, 8, 9)]):
        worlds.run(world, one_round, number, root, ledger, save_at, steps)
    report = verify(read_ledger(ledger), DATASET_SIZE)
    assert report.problems == ()
    # Round 1 went back from step 4 to 2, round 2 from 6 to 5.
    assert (report.steps, report.repeated_steps, report.samples) == (9, 3, 3 * DATASET_SIZE)
    assert list(report.world_by_step.values()) == [2, 2, 4, 4, 4, 3, 3, 3, 3]


def one_round(number: int, root: str, ledger: str, save_at: int, steps: int) -> None:
    with round_number(number):
        engine = make_engine(config(2, elastic={"sample_ledger": ledger}))
    engine.load_checkpoint(root)
    train(engine, save_at)
    engine.save_checkpoint(root)
    train(engine, steps)  # and die, with the steps after the save lost


def test_the_ledger_tells_what_was_consumed_not_what_was_planned(
    worlds: WorldPool, tmp_path: Path
) -> None:
    """A script that trains on one batch over and over is caught by it."""
    worlds.run(1, overfit_one_batch, str(tmp_path))
    assert not verify(read_ledger(tmp_path), DATASET_SIZE).exact


def overfit_one_batch(ledger: str) -> None:
    engine = make_engine(config(2, elastic={"sample_ledger": ledger}))
    batch = next(iter(engine.training_dataloader))
    while engine.global_steps < 1:
        engine.backward(engine(batch))
        engine.step()


# ---- what travels ----


def test_the_bytes_sent_are_the_least_that_ordered_reduction_can_send(worlds: WorldPool) -> None:
    for stage in (1, 2):
        sent = worlds.run(2, bytes_of_one_step, stage)
        for gradients, gathered, padded in sent:
            # Three micro-steps, and one gather of the weights, each of half the buffers.
            assert gradients == 3 * padded * 4 // 2
            assert gathered - padded * 4 // 2 < 0.01 * padded * 4  # and the block norms


def bytes_of_one_step(stage: int) -> tuple[int, int, int]:
    engine = make_engine(config(stage))
    sent = engine._core.collectives.bytes_sent
    sent.clear()
    train(engine, 1)
    padded = sum(unit.padded for unit in engine._core.units if unit.trained)
    return sent["leaves"], sent["gather"], padded
