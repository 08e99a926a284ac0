"""Weights that a forward reads without their module: the bits of stage 0, at every stage."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import settings as searching
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero_deepspeed
from tests.support.training import DIVIDED, config, divided
from tests.support.world import WorldError, WorldPool
from zero_deepspeed.zero import GatheredParameters
from zero_engine.core.engine import Engine

WIDTH = 8


class Block(nn.Module):
    """A layer that can read the weights of others, which are no modules of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.others: tuple[Block, ...] = ()
        self.outside: tuple[nn.Module, ...] = ()
        self.read: Read | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.inner(x)) * self.scale
        return x if self.read is None else self.read(self, x)


Read = Callable[[Block, Tensor], Tensor]
"""What a block computes with the block that comes after it."""


def directly(block: Block, x: Tensor) -> Tensor:
    return F.linear(x, block.others[0].inner.weight, block.others[0].inner.bias)


def both_neighbours(block: Block, x: Tensor) -> Tensor:
    for other in block.others:
        x = x + F.linear(x, other.inner.weight) * other.scale
    return x


def through_a_view(block: Block, x: Tensor) -> Tensor:
    view = block.others[0].inner.weight.t()
    return torch.tanh(block.others[0](x)) @ view


def detached(block: Block, x: Tensor) -> Tensor:
    return block.others[0](x) @ block.others[0].inner.weight.detach()


def as_an_attention(block: Block, x: Tensor) -> Tensor:
    return x @ torch.stack([other.inner.weight for other in block.others]).mean(0)


def recomputed(block: Block, x: Tensor) -> Tensor:
    return checkpoint(directly, block, x, use_reentrant=False)


def recomputed_with_its_module(block: Block, x: Tensor) -> Tensor:
    return checkpoint(through_a_view, block, x, use_reentrant=False)


def recomputed_by_reentering(block: Block, x: Tensor) -> Tensor:
    return checkpoint(constant, block, x, use_reentrant=True)


def constant(block: Block, x: Tensor) -> Tensor:
    return x @ block.others[0].inner.weight.detach()


def gathered_by_hand(block: Block, x: Tensor) -> Tensor:
    with GatheredParameters(block.others[0].inner.weight):
        x = F.linear(x, block.others[0].inner.weight)
    return torch.tanh(x)


def gathers_the_root(block: Block, x: Tensor) -> Tensor:
    with GatheredParameters(block.outside[0].weight):
        return x * block.outside[0].weight.mean()


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), x.t() @ gradient


def by_a_function_of_its_own(block: Block, x: Tensor) -> Tensor:
    return _Product.apply(x, block.others[0].inner.weight)


def without_gradients(block: Block, x: Tensor) -> Tensor:
    with torch.no_grad():
        gate = F.linear(x, block.others[0].inner.weight).sigmoid()
    return x * gate


def from_a_list(block: Block, x: Tensor) -> Tensor:
    weight, bias = list(block.others[0].inner.parameters())
    return F.linear(x, weight=weight, bias=bias)


READS: dict[str, Read] = {
    each.__name__: each
    for each in (
        directly,
        both_neighbours,
        through_a_view,
        detached,
        as_an_attention,
        recomputed,
        recomputed_with_its_module,
        recomputed_by_reentering,
        gathered_by_hand,
        gathers_the_root,
        by_a_function_of_its_own,
        without_gradients,
        from_a_list,
        constant,
    )
}


class Model(nn.Module):
    """Four blocks, of which some read, and a root that may."""

    def __init__(self, reads: dict[int, str], root: str = "", frozen: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self._root = root
        for number, name in reads.items():
            block = self.blocks[number]
            block.others = (self.blocks[(number + 1) % 4], self.blocks[number - 1])
            block.outside = (self.embed,)
            block.read = READS[name]
        for number in frozen:
            self.blocks[number].inner.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        root = getattr(self, f"_{self._root}", None) if self._root else None
        x = self._all(x) if root is None else root(x)
        return self.head(x).square().mean()

    def _all(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def _tied_by_hand(self, x: Tensor) -> Tensor:
        return self._all(x) @ self.blocks[1].inner.weight

    def _view_across(self, x: Tensor) -> Tensor:
        view = self.blocks[2].inner.weight[:, :WIDTH].t()
        return self._all(x) @ view

    def _view_of_its_own(self, x: Tensor) -> Tensor:
        view = self.embed.weight.t()
        return self._all(x) + view.sum()

    def _in_a_checkpoint(self, x: Tensor) -> Tensor:
        weight = self.blocks[3].inner.weight
        return checkpoint(F.linear, self._all(x), weight, use_reentrant=False)

    def _never_called(self, x: Tensor) -> Tensor:
        for block in self.blocks[:3]:
            x = block(x)
        return F.linear(x, self.blocks[3].inner.weight, self.blocks[3].inner.bias)

    def _checkpointed_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    def _reentered_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x


class Skipping(nn.Linear):
    """Returns its bias instead of adding it, as Megatron's `skip_bias_add`; and views of both."""

    def forward(self, x: Tensor) -> Any:
        return F.linear(x, self.weight), {"bias": self.bias, "views": [self.weight.t()]}


class SkippingModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Skipping(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            value, skipped = block(x)
            x = torch.tanh(value + skipped["bias"]) @ skipped["views"][0]
        return self.head(x).square().mean()


STAGE_3: dict[str, dict[str, Any]] = {
    "plain": {},
    "nothing ahead": {"zero_optimization": DIVIDED | {"stage3_prefetch_bucket_size": 0}},
    "accumulated": {"train_batch_size": 8},
    "recomputed": {"activation_checkpointing": {"modules": ["blocks.*"]}},
    "bf16": {"bf16": {"enabled": True}},
    "arriving": {"zero_optimization": divided(2), "elastic": {"overlap_param_gather": True}},
}


def fit(
    make: Callable[[], nn.Module], settings: dict[str, Any], hook: bool = False, held: bool = False
) -> Any:
    """Two steps with an evaluation between them; weights, losses and what evaluation has given."""
    torch.manual_seed(3)
    model = make()
    settings = config(0, train_batch_size=2) | {"train_micro_batch_size_per_gpu": 1} | settings
    engine: Engine
    engine, *_ = zero_deepspeed.initialize(model=model, config=settings)
    dtype = torch.bfloat16 if settings["bf16"]["enabled"] else torch.float32
    looks: list[Tensor] = []
    if hook:
        watch(engine, looks)
    seen = []
    while engine.global_steps < 2:
        micro = engine._run.microbatch().index
        x = torch.full((2, 3), 0.1 * micro + engine.global_steps, dtype=dtype)
        with GatheredParameters(engine.module, enabled=held):
            loss = engine(x)
        engine.backward(loss)
        engine.step()
        with torch.no_grad():
            seen.append(engine(torch.ones(2, 3, dtype=dtype)).item())
    return engine.weight_hash(), engine.mean_loss, seen[-1], [look.item() for look in looks]


def watch(engine: Engine, looks: list[Tensor]) -> None:
    """Look at weights that have just been released, and at some that have not been gathered."""
    blocks = engine.module.blocks

    def look(module: nn.Module, *_: Any) -> None:
        looks[:] = [*looks[-6:], module.inner.weight.detach().norm(), blocks[0].inner.weight.norm()]

    for block in blocks:
        block.register_forward_hook(look)


FROZEN: dict[str, tuple[int, ...]] = {"trained": (), "partly frozen": (1, 3)}
ROOTS = {
    "tied_by_hand": "directly",
    "view_across": "directly",
    "view_of_its_own": "gathers_the_root",
    "in_a_checkpoint": "through_a_view",
    "never_called": "directly",
    "checkpointed_blocks": "detached",
    "reentered_blocks": "constant",
}
"""What the model reads, and what its second block does."""


def models(how: str, how_of_roots: str) -> dict[str, Callable[[], nn.Module]]:
    """One of each block that reads, and of each root, that are trained or partly frozen."""
    frozen, of_roots = FROZEN[how], FROZEN[how_of_roots]
    return {
        "returned": SkippingModel,
        **{read: partial(Model, {0: read, 2: read}, frozen=frozen) for read in READS},
        **{root: partial(Model, {1: read}, root, of_roots) for root, read in ROOTS.items()},
    }


def fit_all(hows: tuple[str, str], settings: dict[str, Any]) -> dict[str, Any]:
    return {name: fit(make, settings) for name, make in models(*hows).items()}


def same_as_stage_0(worlds: WorldPool, job: Callable[..., Any], settings: dict[str, Any]) -> None:
    stage_0 = {key: value for key, value in settings.items() if key in ("bf16", "train_batch_size")}
    (whole,) = worlds.run(1, job, stage_0)
    for seen in worlds.run(2, job, {"zero_optimization": DIVIDED} | settings):
        assert {name: value for name, value in seen.items() if value != whole[name]} == {}


@pytest.mark.parametrize("settings", STAGE_3.values(), ids=STAGE_3)
@pytest.mark.parametrize("hows", [tuple(FROZEN), tuple(FROZEN)[::-1]], ids=str)
@pytest.mark.corners(settings=[STAGE_3["plain"]], hows=[tuple(FROZEN)])
def test_a_forward_reads_weights_without_their_module(
    worlds: WorldPool, hows: tuple[str, str], settings: dict[str, Any]
) -> None:
    same_as_stage_0(worlds, partial(fit_all, hows), settings)


@pytest.mark.full
@pytest.mark.parametrize("settings", STAGE_3.values(), ids=STAGE_3)
@pytest.mark.parametrize("how", ["hook", "held"])
def test_hooks_and_contexts_around_a_forward(
    worlds: WorldPool, how: str, settings: dict[str, Any]
) -> None:
    same_as_stage_0(worlds, partial(fit_watched, how), settings)


def fit_watched(how: str, settings: dict[str, Any]) -> dict[str, Any]:
    """A hook that reads weights that were released; a context that ends before backward."""
    return {how: fit(partial(Model, {1: "directly"}, "tied_by_hand"), settings, **{how: True})}


# ---- a search ----

SEARCHED = st.fixed_dictionaries(
    {
        "reads": st.dictionaries(st.integers(0, 3), st.sampled_from(sorted(READS)), max_size=4),
        "root": st.sampled_from(["", *ROOTS]),
        "frozen": st.sets(st.integers(0, 3)).map(sorted).map(tuple),
    }
)
REENTERED = ("recomputed_by_reentering", "reentered_blocks")


def possible(model: dict[str, Any]) -> bool:
    """Whether no parameter has two gradients, in a reentrant checkpoint and elsewhere."""
    if model["root"] == "reentered_blocks":
        return set(model["reads"].values()) <= {"constant", "without_gradients"}
    return True


@searching(max_examples=15)
@given(drawn=SEARCHED.filter(possible), settings=st.sampled_from(sorted(STAGE_3)))
@pytest.mark.full
def test_whatever_reads_which_weights(
    worlds: WorldPool, drawn: dict[str, Any], settings: str
) -> None:
    same_as_stage_0(worlds, partial(fit_one, drawn), STAGE_3[settings])


def fit_one(drawn: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    return {"drawn": fit(partial(Model, **drawn), settings)}


# ---- what cannot be gathered ----


class Beside(Model):
    """A method that is no forward, and a forward that takes `data`."""

    def product(self, x: Tensor) -> Tensor:
        return F.linear(x, self.blocks[2].inner.weight)

    def _data(self, x: Tensor) -> Tensor:
        seen = self.blocks[2].inner.weight.data
        assert bool(seen.isnan().all()), "one rank alone may log it"
        return x @ seen.t()


def misuse(kind: str) -> None:
    engines: list[Engine] = []
    for _ in range(2):
        model = Beside({}, "data" if kind == "data" else "")
        engines.append(zero_deepspeed.initialize(model=model, config=config(3))[0])
    weight = engines[0].module.blocks[2].inner.weight
    match kind:
        case "beside":
            engines[0].module.product(torch.ones(1, WIDTH))
        case "data":
            engines[0](torch.ones(1, 3))
        case "of another engine":
            engines[1].module.blocks[0].read = lambda _, x: F.linear(x, weight)
            engines[1](torch.ones(1, 3))
        case "average":
            torch.zeros_like(weight).lerp_(weight, 0.1)


@pytest.mark.parametrize("kind", ["beside", "data", "of another engine", "average"])
@pytest.mark.corners(kind=["beside"])
def test_what_is_not_gathered_is_an_error_and_never_nan(worlds: WorldPool, kind: str) -> None:
    named = r"(linear|lerp_): blocks.2.inner.weight is divided, and no forward of its engine"
    message = r"`\.data` of a parameter that is divided" if kind == "data" else named
    with pytest.raises(WorldError, match=message):
        worlds.run(2, misuse, kind)
