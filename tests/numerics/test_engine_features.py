"""Models of every kind and misuse of every kind: the bits, or the message."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import zero_deepspeed
from tests.numerics.test_global_batch import train_in_one_go
from tests.support.models import TinyGPT, Tokens, make_model, param_groups
from tests.support.training import DATASET_SIZE, config, make_engine, train
from tests.support.world import (
    Stages,
    WorldError,
    WorldPool,
    of_stages,
    one_of_stages,
    one_result,
)
from zero_engine.core.engine import Engine

STEPS = 4
STAGES = (0, 1, 2, 3)


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


@pytest.mark.full  # test_branches and test_queued stand for it
def test_a_branch_that_only_some_ranks_take_does_not_desynchronise_them(
    worlds: WorldPool,
) -> None:
    assert len(set(one_result(worlds, train_branching, sizes=(1, 2, 3)))) == 1


def train_branching() -> list[str]:
    hashes = []
    for stage in (0, 1, 2):
        torch.manual_seed(0)
        engine, *_ = zero_deepspeed.initialize(
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


@pytest.mark.full  # test_reads and test_activations stand for it
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
        engine, *_ = zero_deepspeed.initialize(
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
    for stage in (0, 3):
        model = make_model()
        for name, param in model.named_parameters():
            param.requires_grad_("norm" in name)
        engine = make_frozen_engine(model, stage)
        frozen = next(
            u for u in engine._core.units if u.spec.name == "blocks.1 (untrained, float32)"
        )

        def look(when: str, _gradient: Tensor, frozen: Any = frozen) -> None:
            seen[when] = frozen.gathered

        model.blocks[1].norm2.weight.register_hook(partial(look, "during its backward"))
        model.blocks[0].norm1.weight.register_hook(partial(look, "after it"))
        train(engine, STEPS)
        hashes.append(engine.weight_hash())
    return hashes, seen


def make_frozen_engine(model: nn.Module, stage: int) -> Engine:
    engine, *_ = zero_deepspeed.initialize(
        model=model, training_data=Tokens(DATASET_SIZE), config=config(stage)
    )
    return engine


def train_embedding(stage: int, sparse: bool) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 40, sparse=sparse), nn.Linear(40, 1))
    settings = {"train_batch_size": 6, "train_micro_batch_size_per_gpu": 1}
    optimizer = {"type": "Adam", "params": {"lr": 0.1}}
    settings |= {"zero_optimization": {"stage": stage}, "optimizer": optimizer}
    engine, _, loader, _ = zero_deepspeed.initialize(
        model=model, config=settings, training_data=[torch.tensor([i, i, 3]) for i in range(12)]
    )
    for batch in loader:
        engine.backward(engine(batch).square().mean())
        engine.step()
    return engine.weight_hash()


@of_stages
def test_a_sparse_embedding_trains_to_the_bits_of_a_dense_one(
    worlds: WorldPool, stages: Stages
) -> None:
    dense = one_of_stages(worlds, {1: (0,)}, train_embedding, False)
    assert one_of_stages(worlds, stages, train_embedding, True) == dense


def train_on_losses(*shape: int) -> tuple[str, list[float]]:
    engine = make_engine(config(1))
    run = engine.module.forward
    engine.module.forward = lambda tokens: run(tokens).view(shape)
    losses = train(engine, 2)
    return engine.weight_hash(), losses


def test_a_loss_may_have_one_dimension(worlds: WorldPool) -> None:
    assert worlds.run(2, train_on_losses, 1) == worlds.run(2, train_on_losses)


@pytest.mark.full  # promises/test_beside_training stands for it
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


@pytest.mark.full  # test_deepspeed_api and test_engine_as_module stand for it
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
    engine = make_engine(config(2, fp16={"enabled": "fp16" in kind}))
    batch = next(iter(engine.training_dataloader))
    loss = engine(batch)
    match kind:
        case "loss.backward in fp16":
            loss.backward()
        case "step first":
            engine.step()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("loss.backward in fp16", r"engine\.scale\(loss\)\.backward\(\)"),
        ("step first", "call engine.backward"),
    ],
)
def test_a_call_out_of_order_is_named(worlds: WorldPool, kind: str, message: str) -> None:
    with pytest.raises(WorldError, match=message):
        worlds.run(1, misuse, kind)


def test_parameters_of_two_dtypes_in_fp32_training_are_refused_with_the_remedy(
    worlds: WorldPool,
) -> None:
    with pytest.raises(WorldError, match=r"torch\.bfloat16 in fp32 training; set bf16\.enabled"):
        worlds.run(1, initialize_partly_bf16)


def initialize_partly_bf16() -> None:
    model = make_model()
    model.blocks[0].bfloat16()
    zero_deepspeed.initialize(model=model, config=config())


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
    padded = sum(unit.padded for unit in engine._core.units if unit.spec.trained)
    return sent["gradients"], sent["gather"], padded
