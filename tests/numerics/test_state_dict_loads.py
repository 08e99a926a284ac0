"""engine.load_state_dict(): what is loaded, what is refused, and on which ranks."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero_deepspeed
from tests.numerics.peak_memory import resident
from tests.support.models import TinyGPT
from tests.support.queued import BACKEND
from tests.support.training import config, make_engine, train
from tests.support.world import WorldPool
from zero_deepspeed.zero import GatheredParameters
from zero_engine.core.engine import Engine


class Whole(TinyGPT):
    """Also a module in two places, and a parameter in a unit inside of a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.blocks[0].norm1
        self.blocks[1].inner = nn.ModuleList([nn.Linear(3, 5)])


def engine_of(seed: int, stage: int, *, bf16: bool = False, **more: Any) -> Engine:
    torch.manual_seed(seed)
    return make_engine(config(stage, bf16=bf16, **more), model=Whole())


def given(seed: int) -> dict[str, Tensor]:
    """The dictionary of another model, in fp32."""
    torch.manual_seed(seed)
    return {f"module.{name}": value for name, value in Whole().state_dict().items()}


def loaded(before: Mapping[str, Tensor], change: Mapping[str, Tensor], dtype: Any) -> Any:
    """The master weights after a load: what the module computes with is `change`, in its dtype;
    elements that are the same there keep the precision that they have."""
    result = {}
    for name, value in before.items():
        new = change.get(f"module.{name}")
        if new is None or not value.is_floating_point():
            result[name] = value
            continue
        computed = new.to(torch.float32 if name == "temperature" else dtype)  # a buffer
        result[name] = torch.where(computed != value.to(computed.dtype), computed.float(), value)
    return result


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# ---- what is loaded ----


@pytest.mark.corners(stage=[3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_weights_are_those_of_rank_0_to_the_bit(worlds: WorldPool, stage: int) -> None:
    first = worlds.run(1, load_several, stage)
    assert worlds.run(3, load_several, stage) == first * 3
    assert worlds.run(2, load_several, stage, backend=BACKEND) == first * 2


def load_several(stage: int) -> list[str]:
    """In fp32 and bf16, hashes after loads of a part, of all and of rank 0's, and a step."""
    rank, hashes = dist.get_rank(), []
    for bf16 in (False, True):
        engine = engine_of(7, stage, bf16=bf16)
        train(engine, 1)
        before = engine.get_fp32_state_dict()
        mixed = given(8)
        for number, name in enumerate(mixed):  # half of the elements as they are
            if number % 2 and mixed[name].is_floating_point():
                mixed[name].flatten()[::2] = before[name.removeprefix("module.")].flatten()[::2]
        some = {name: value for name, value in mixed.items() if "blocks.1" in name}
        for change, strict in ((some, False), (mixed, True), (given(9), True)):
            mine = change if rank == 0 or change is mixed else {}
            keys = engine.load_state_dict(mine, strict)
            wanted = loaded(before, change, torch.bfloat16 if bf16 else torch.float32)
            before = engine.get_fp32_state_dict()
            assert keys.missing_keys == [n for n in given(8) if n not in change]
            assert not keys.unexpected_keys
            assert same(before, wanted)
        torch.manual_seed(0)
        train(engine, 2)
        hashes.append(engine.weight_hash())
    return hashes


def test_weights_that_a_script_has_gathered_are_loaded_too(worlds: WorldPool) -> None:
    assert worlds.run(2, load_while_gathered) == [[True, True, True]] * 2


def load_while_gathered() -> list[bool]:
    """A change in the same unit, made before, is kept as well."""
    engine, new = engine_of(7, 3), given(8)
    name = "module.blocks.0.up.weight"
    block = engine.module.blocks[0]
    with GatheredParameters(list(block.parameters()), modifier_rank=0):
        block.up.bias.data.fill_(3)
        engine.load_state_dict({name: new[name]}, strict=False)
        there = torch.equal(block.up.weight, new[name])
    whole = engine.module_state_dict()
    weight, bias = whole["blocks.0.up.weight"], whole["blocks.0.up.bias"]
    return [there, torch.equal(weight, new[name]), bool((bias == 3).all())]


def test_quantized_weights_that_are_not_in_the_dictionary_keep_their_precision(
    worlds: WorldPool,
) -> None:
    assert worlds.run(2, load_beside_quantized) == [[True] * 4] * 2


def load_beside_quantized() -> list[bool]:
    """In fp32 and in bf16, by a dictionary and by a script's context."""
    found = []
    for bf16 in (False, True):
        zero = {"stage": 3, "zero_quantized_weights": True}
        engine, new = engine_of(7, 3, bf16=bf16, zero_optimization=zero), given(8)
        train(engine, 1)
        dtype = torch.bfloat16 if bf16 else torch.float32
        change = {"module.blocks.0.up.bias": new["module.blocks.0.up.bias"]}
        before = engine.get_fp32_state_dict()
        engine.load_state_dict(change, strict=False)
        after = engine.get_fp32_state_dict()
        found.append(same(after, loaded(before, change, dtype)))
        with GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
            pass
        found.append(same(engine.get_fp32_state_dict(), after))
    return found


def test_a_model_on_meta_that_awaits_its_weights_takes_them_from_a_dictionary(
    worlds: WorldPool,
) -> None:
    for refused, same_weights in worlds.run(2, load_into_meta):
        assert "load_state_dict() of a part of the weights: the state is neither" in refused
        assert same_weights


def load_into_meta() -> tuple[str, bool]:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    settings = config(3, elastic={"initial_weights": "checkpoint"})
    engine, *_ = zero_deepspeed.initialize(model=model, config=settings)
    torch.manual_seed(4)
    plain = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)).state_dict()
    new = {f"module.{name}": value for name, value in plain.items()} if dist.get_rank() == 0 else {}
    with pytest.raises(zero_deepspeed.ZeroError) as caught:
        engine.load_state_dict({k: v for k, v in new.items() if "0" in k}, strict=False)
    engine.load_state_dict(new)
    return str(caught.value), same(engine.module_state_dict(), plain)


# ---- what is refused ----


class Unreadable(Mapping[str, Tensor]):
    """A dictionary whose file is gone."""

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[str]:
        return iter(["module.position"])

    def __getitem__(self, name: str) -> Tensor:
        raise OSError(f"the file of {name} is gone")


def spoiled(how: str) -> Mapping[str, Any]:
    state: dict[str, Any] = given(8)
    match how:
        case "missing":
            del state["module.blocks.1.norm2.bias"]
        case "unexpected":
            state["module.blocks.7.norm2.bias"] = torch.ones(3)
        case "shape":
            state["module.blocks.1.norm2.bias"] = torch.ones(3)
        case "type":
            state["module.position"] = [1.0]
        case "meta":
            state["module.position"] = state["module.position"].to("meta")
        case "unreadable":
            return Unreadable()
    return state


KINDS = ("missing", "unexpected", "shape", "type", "meta", "unreadable")


@pytest.mark.corners(stage=[2, 3])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_what_one_rank_cannot_load_no_rank_loads(worlds: WorldPool, stage: int) -> None:
    for bad in (0, 1):
        for rank, (stories, unchanged) in enumerate(worlds.run(2, refuse, stage, bad)):
            assert unchanged
            for kind, (mine, plain) in zip(KINDS, stories, strict=True):
                if rank == bad:
                    assert mine == plain, kind
                else:
                    text = plain.partition(": ")[2]
                    start = f"RuntimeError: rank {bad} could not load its state_dict, so it is"
                    assert mine == f"{start} loaded on none: {text}", kind


def refuse(stage: int, bad: int) -> tuple[list[tuple[str, str]], bool]:
    """By kind, what the engine tells and what torch tells; and whether nothing has changed."""
    engine, plain = engine_of(7, stage), nn.ModuleDict({"module": Whole()})
    before, stories = engine.module_state_dict(), []
    for kind in KINDS:
        bad_here = dist.get_rank() == bad
        told = []
        for module, state in (
            (engine, spoiled(kind) if bad_here else given(8)),
            (plain, spoiled(kind)),
        ):
            with pytest.raises(Exception) as caught:  # noqa: PT011 - of each kind its own
                module.load_state_dict(state)
            text = str(caught.value).replace(" ModuleDict:", f" {type(engine).__name__}:")
            told.append(f"{type(caught.value).__name__}: {text}")
        stories.append((told[0], told[1]))
    own = dict(engine.module.named_buffers())["temperature"]
    unchanged = same(engine.module_state_dict(), before) and torch.equal(own, before["temperature"])
    return stories, unchanged


def test_a_load_that_fails_half_way_is_known_to_all_ranks_and_mended_by_another(
    worlds: WorldPool,
) -> None:
    for told, refused, mended in worlds.run(2, fail_half_way):
        assert "load_state_dict() has failed half way: rank 1 could not write" in told
        assert "weight_hash(): the state is neither the old one nor that of a checkp" in refused
        assert mended


def fail_half_way() -> tuple[str, str, bool]:
    """Rank 1 has no memory for the second unit, of 64 MiB."""
    model = nn.ModuleDict({"list": nn.ModuleList([nn.Linear(9, 9), nn.Linear(4096, 4096, False)])})
    new = {f"module.{name}": torch.full(p.shape, 3.0) for name, p in model.named_parameters()}
    engine, *_ = zero_deepspeed.initialize(model=model, config=config(3))
    before = resource.getrlimit(resource.RLIMIT_DATA)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_DATA, (resident("VmData") + (16 << 20), before[1]))
    try:
        with pytest.raises(RuntimeError) as told:
            engine.load_state_dict(new)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
    with pytest.raises(zero_deepspeed.ZeroError) as refused:
        engine.weight_hash()
    engine.load_state_dict(new)
    mended = all(bool((value == 3).all()) for value in engine.module_state_dict().values())
    return str(told.value), str(refused.value), mended


# ---- modules that load by code of their own ----


class Growing(nn.Linear):
    """It keeps the rows that the dictionary does not have, and scales everything afterwards."""

    def _load_from_state_dict(self, state: Any, prefix: str, *others: Any) -> None:
        given = state[f"{prefix}weight"]
        state[f"{prefix}weight"] = torch.cat([given, self.weight.detach()[len(given) :]])
        super()._load_from_state_dict(state, prefix, *others)
        self.bias.data.mul_(2)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.corners(stage=[3])
def test_a_module_that_loads_by_its_own_code_reads_and_writes_its_weights(
    worlds: WorldPool, stage: int
) -> None:
    assert worlds.run(2, load_growing, stage) == [True, True]


def load_growing(stage: int) -> bool:
    torch.manual_seed(3)
    model = nn.ModuleDict({"own": Growing(4, 6), "plain": nn.Linear(4, 6)})
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    engine, *_ = zero_deepspeed.initialize(model=model, config=config(stage))
    new = {f"module.{name}": torch.full_like(value, 5) for name, value in expected.items()}
    new["module.own.weight"] = new["module.own.weight"][:2]
    engine.load_state_dict(new)
    expected["own.weight"][:2] = 5
    expected["own.bias"].fill_(10)
    expected["plain.weight"].fill_(5)
    expected["plain.bias"].fill_(5)
    return same(engine.module_state_dict(), expected)


class WithExtraState(nn.Linear):
    """Scales, say."""

    def get_extra_state(self) -> float:
        return 2.0

    def set_extra_state(self, state: float) -> None:
        self.scale = state


def test_extra_state_is_not_forgotten_on_ranks_without_a_dictionary(worlds: WorldPool) -> None:
    for message, scale in worlds.run(2, load_extra_state):
        assert "module has extra state, which is not sent between ranks" in message
        assert scale == 2.0


def load_extra_state() -> tuple[str, float]:
    model = WithExtraState(3, 3)
    state = {f"module.{name}": value for name, value in WithExtraState(3, 3).state_dict().items()}
    engine, *_ = zero_deepspeed.initialize(model=model, config=config(3))
    with pytest.raises(Exception, match="rank") as caught:
        engine.load_state_dict(state if dist.get_rank() == 0 else {})
    engine.load_state_dict(state)
    return str(caught.value), model.scale
