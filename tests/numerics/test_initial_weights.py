"""Models that no rank holds: made under zero.Init, or on the meta device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero_deepspeed
from tests.support import queued
from tests.support.models import make_model
from tests.support.training import config, make_engine, train
from tests.support.world import WorldPool, one_result
from zero_checkpoint.errors import ModelMismatch
from zero_comm.exchange.comms_log import LOG, CommsLogger
from zero_contract.errors import ConfigError, ZeroError
from zero_deepspeed.zero import GatheredParameters, Init
from zero_engine.parameters import construction
from zero_engine.parameters.early_shards import share_of

WIDTH = 24


class Deep(nn.Module):
    """Modules of torch alone, whose own initialisers set everything; head and embedding tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0) for _ in range(3)
        )
        self.norm = nn.BatchNorm1d(WIDTH, track_running_stats=True).eval()
        self.head = nn.Linear(WIDTH, 50, bias=False)
        self.head.weight = self.embed.weight
        self.blocks[1].linear1.bias.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x).float().square().mean()


def on_meta(make: Callable[[], nn.Module] = Deep) -> nn.Module:
    with torch.device("meta"):
        return make()


def settings(stage: int, **elastic: str) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "train_batch_size": 6,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "elastic": dict(elastic),
    }


# ---- zero.Init ----


def test_a_model_made_under_zero_init_has_the_bits_of_an_ordinary_one(worlds: WorldPool) -> None:
    ordinary, _ = one_result(worlds, trained_hashes, False, sizes=(1,))
    made, divided = one_result(worlds, trained_hashes, True, sizes=(1, 3))
    assert made == ordinary
    assert divided
    assert worlds.run(2, trained_hashes, True, backend=queued.BACKEND) == [(ordinary, True)] * 2


def trained_hashes(under_init: bool) -> tuple[list[str], bool]:
    """Hashes before and after training, and whether the parameters were divided before."""
    torch.manual_seed(7 + dist.get_rank())  # the weights are those of rank 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(construction, "OPEN_ELEMENTS", 2000)  # about a fifth of a block
        with Init(config_dict_or_path=config(3), enabled=under_init):
            model = make_model(7 + dist.get_rank())
    divided = all(bool(p.isnan().all()) and share_of(p) for p in model.parameters())
    engine = make_engine(config(3), model=model)
    hashes = [engine.weight_hash()]
    train(engine, 2)
    return [*hashes, engine.weight_hash()], divided


def test_constructors_copy_and_change_parameters_that_are_divided_already(
    worlds: WorldPool,
) -> None:
    assert one_result(worlds, made_of_copies, sizes=(1, 2)) == [True] * 5


class Copies(nn.Module):
    """What constructors do with parameters of modules that are complete."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.several = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 9), 3, enable_nested_tensor=False
        )
        self.first.weight.data.normal_()
        self.apply(self.scale)
        self.second = nn.Linear(5, 7)
        self.second.weight.data.copy_(self.first.weight.data)
        with torch.no_grad():
            self.second.weight[0] = 1.0

    def scale(self, module: nn.Module) -> None:
        for param in module.parameters(recurse=False):
            with torch.no_grad():
                param.mul_(2)


def made_of_copies() -> list[bool]:
    torch.manual_seed(3)
    plain = Copies().state_dict()
    torch.manual_seed(3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(construction, "OPEN_ELEMENTS", 1)
        with Init():
            model = Copies()
    divided = all(share_of(param) is not None for param in model.parameters())
    with GatheredParameters(model, modifier_rank=0):
        same = all(torch.equal(plain[name], p) for name, p in model.named_parameters())
        if dist.get_rank() == 0:
            model.first.bias.data.fill_(3)
    with GatheredParameters(model.first.bias):
        changed = model.first.bias.tolist() == [3.0] * 7
    other = copy.deepcopy(model).bfloat16()
    same_later = share_of(other.first.weight) is not None
    with GatheredParameters(other), GatheredParameters(model):
        pairs = zip(other.parameters(), model.parameters(), strict=True)
        copied = all(torch.equal(ours, theirs.bfloat16()) for ours, theirs in pairs)
    return [divided, same, changed, same_later, copied]


@pytest.mark.parametrize("stage", [0, 3])
def test_init_at_stages_without_divided_parameters_leaves_them_whole(stage: int) -> None:
    assert Init(config_dict_or_path=config(stage))._divides == (stage == 3)


class HalfWritten(nn.Module):
    """A matrix that nobody has written to, as constructors of transformers leave them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(40, 50))
        self.scale = nn.Parameter(torch.ones(8))


def test_memory_that_nobody_has_written_to_is_not_sent(worlds: WorldPool) -> None:
    (sent, *values), (_, *others) = worlds.run(2, made_half_written)
    assert sent == {4: 2, 32: 1}  # of two parameters whether they are written, and the scale
    assert values == others == [True, True, True]


def made_half_written() -> tuple[Any, ...]:
    LOG.configure(CommsLogger(enabled=True))
    with Init():
        model = HalfWritten()
    rows = [line.replace(",", "").split() for line in LOG.lines() if line.startswith("broadcast")]
    LOG.configure(CommsLogger())
    with GatheredParameters(model, modifier_rank=0):
        zeros, ones = not model.weight.any(), bool((model.scale == 1).all())
        model.weight.data.fill_(3 + dist.get_rank())
    with GatheredParameters(model):
        written = bool((model.weight == 3).all())
    return {int(row[1]): int(row[2]) for row in rows}, zeros, ones, written


def test_a_load_into_divided_parameters_says_where_it_works(worlds: WorldPool) -> None:
    for message, loaded, assigned in worlds.run(2, load_into_divided):
        assert message.startswith("load_state_dict(): layers.weight is divided among the ranks")
        assert "load inside zero.GatheredParameters(model, modifier_rank=0)" in message
        assert loaded == assigned == 2.0


def load_into_divided() -> tuple[str, float, float]:
    with Init():
        model = nn.ModuleDict({"layers": nn.Linear(5, 3)})
    weights = {name: torch.full(p.shape, 2.0) for name, p in model.named_parameters()}
    with pytest.raises(ZeroError) as caught:
        model.load_state_dict(weights)
    with GatheredParameters(model, modifier_rank=0):
        model.load_state_dict(weights)
    with GatheredParameters(model):
        loaded = model.layers.weight.mean().item()
    model.load_state_dict(weights, assign=True)  # parameters that are whole take their place
    return str(caught.value), loaded, model.layers.weight.mean().item()


# ---- the meta device ----


@pytest.mark.corners(stage=[3])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_model_on_meta_has_the_same_bits_at_every_world_size(
    worlds: WorldPool, stage: int
) -> None:
    first = one_result(worlds, hashes_from_meta, 3, 5, sizes=(1, 3))
    assert one_result(worlds, hashes_from_meta, stage, 5, sizes=(2,)) == first
    if stage == 3:
        assert one_result(worlds, hashes_from_meta, 3, 6, sizes=(1,)) != first


def hashes_from_meta(stage: int, seed: int) -> tuple[str, ...]:
    torch.manual_seed(seed if dist.get_rank() == 0 else 99)
    before = torch.get_rng_state()
    model = on_meta()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # of parameters without values
    engine, *_ = zero_deepspeed.initialize(
        model=model, optimizer=optimizer, config=settings(stage) | {"bf16": {"enabled": stage == 9}}
    )
    assert torch.equal(torch.get_rng_state(), before)  # the script's draws are its own
    whole = engine.module_state_dict()
    assert not any(bool(value.isnan().any()) for value in whole.values())
    assert whole["norm.running_var"].tolist() == [1.0] * WIDTH
    assert whole["blocks.0.norm1.weight"].tolist() == [1.0] * WIDTH
    assert not whole["blocks.1.linear1.bias"].requires_grad
    first = engine.weight_hash()
    while engine.global_steps < 1:
        engine.backward(engine(torch.arange(8).view(4, 2)))
        engine.step()
    return first, engine.weight_hash()


class Raw(nn.Module):
    """A parameter that no initialiser sets."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(3, 3)])
        self.scale = nn.Parameter(torch.ones(3))


class Forgets(nn.Linear):
    """Its initialiser sets the weight alone."""

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


class WithForgets(nn.Module):
    """It has such a module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Forgets(3, 3)


class Masked(nn.Module):
    """A buffer that no initialiser sets."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("mask", torch.ones(3))


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (Raw, "scale is on the meta device, and module the model (Raw) has no initialiser"),
        (WithForgets, "inner.bias is on the meta device, and the initialiser of Forgets leaves"),
        (Masked, "mask is on the meta device, and module the model (Masked) has no initialiser"),
    ],
)
def test_what_no_initialiser_sets_is_an_error_that_names_it_on_every_rank(
    worlds: WorldPool, make: Callable[[], nn.Module], named: str
) -> None:
    first, second = worlds.run(2, refusal, make)
    assert first.startswith(named)
    assert "make the model under zero.Init" in first
    assert second == first or "rank 0 could not set the initial weights" in second


def refusal(make: Callable[[], nn.Module]) -> str:
    with pytest.raises(ConfigError) as caught:
        zero_deepspeed.initialize(model=on_meta(make), config=settings(3))
    return str(caught.value)


class Ruled(nn.Module):
    """A model that sets its modules by itself, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Raw(), Raw()])

    def _init_weights(self, module: nn.Module) -> None:
        for param in module.parameters(recurse=False):
            nn.init.constant_(param, param.dim())


def test_a_model_sets_its_modules_by_itself(worlds: WorldPool) -> None:
    for values in worlds.run(2, ruled_values):
        assert values == {"weight": 2.0, "bias": 1.0, "scale": 1.0}


def ruled_values() -> dict[str, float]:
    engine, *_ = zero_deepspeed.initialize(model=on_meta(Ruled), config=settings(3))
    whole = engine.module_state_dict()
    return {name.rpartition(".")[2]: value.mean().item() for name, value in whole.items()}


# ---- weights that are there already ----


def test_a_checkpoint_is_loaded_into_a_model_on_meta_that_nobody_has_initialised(
    worlds: WorldPool, tmp_path: Path
) -> None:
    saved = worlds.run(2, save_one, str(tmp_path))[0]
    for problem, loaded in worlds.run(3, load_into_meta, str(tmp_path)):
        assert "no checkpoint has been loaded into the" in problem
        assert loaded == saved
    for loaded in worlds.run(2, weights_from_files, str(tmp_path / "model.safetensors")):
        assert loaded == saved
    for problem in worlds.run(1, missing_in_files, str(tmp_path)):
        assert "2 parameters are not in the 1 safetensors files" in problem
        assert "first layer.weight" in problem


class Deeper(Deep):
    """A later version of the model, with a parameter more."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))


@pytest.mark.corners(stage=[3])
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize(
    ("later", "left_out"),
    [(Deep, "blocks.1.linear1.bias"), (Deeper, "scale")],
    ids=["frozen ones were left out", "the model has grown"],
)
def test_a_load_that_leaves_a_parameter_without_values_is_refused(
    worlds: WorldPool, tmp_path: Path, stage: int, later: type[Deep], left_out: str
) -> None:
    worlds.run(1, save_one, str(tmp_path), later is Deep)
    for refused, unusable, whole, loaded in worlds.run(
        2, load_a_part_into_meta, str(tmp_path), stage, later
    ):
        assert f"does not have 1 parameters that have no values here, first {left_out}; " in refused
        assert "no checkpoint has been loaded into the" in unusable
        # Behind a whole dictionary it may leave out what it likes.
        assert torch.equal(loaded[left_out], whole[left_out])
        assert not torch.equal(loaded["embed.weight"], whole["embed.weight"])


def load_a_part_into_meta(root: str, stage: int, later: type[Deep]) -> tuple[Any, ...]:
    given = settings(stage, initial_weights="checkpoint")
    engine, *_ = zero_deepspeed.initialize(model=on_meta(later), config=given)
    grown = later is Deeper
    load = partial(
        engine.load_checkpoint,
        root,
        load_module_strict=not grown,
        load_optimizer_states=not grown,
    )
    with pytest.raises(ModelMismatch) as refused:
        load()
    with pytest.raises(ZeroError) as unusable:
        engine(torch.ones(1, dtype=torch.long))
    torch.manual_seed(2)
    whole = later().state_dict()
    engine.load_state_dict({f"module.{name}": value for name, value in whole.items()})
    load()
    return str(refused.value), str(unusable.value), whole, engine.module_state_dict()


def save_one(root: str, exclude_frozen: bool = False) -> str:
    torch.manual_seed(1)
    engine, *_ = zero_deepspeed.initialize(model=Deep(), config=settings(3))
    engine.save_checkpoint(root, exclude_frozen_parameters=exclude_frozen)
    engine.save_16bit_model(root, "model.safetensors")
    return engine.weight_hash()


def load_into_meta(root: str) -> tuple[str, str]:
    given = settings(3, initial_weights="checkpoint")
    engine, *_ = zero_deepspeed.initialize(model=on_meta(), config=given)
    with pytest.raises(ZeroError) as caught:
        engine(torch.ones(1, dtype=torch.long))
    engine.load_checkpoint(root)
    return str(caught.value), engine.weight_hash()


def weights_from_files(path: str) -> str:
    engine, *_ = zero_deepspeed.initialize(
        model=on_meta(), config=settings(3, initial_weights=path)
    )
    return engine.weight_hash()


class Other(nn.Module):
    """A model that the files do not hold."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)


def missing_in_files(root: str) -> str:
    with pytest.raises(ConfigError) as caught:
        zero_deepspeed.initialize(model=on_meta(Other), config=settings(3, initial_weights=root))
    return str(caught.value)
