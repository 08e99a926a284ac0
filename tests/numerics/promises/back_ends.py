"""One training by any back end: a script as a `Recipe`, and the same surface for who runs it.

A promise is tested once, over this table:

==========  =====================================================================================
back end    what it cannot be, and what is said instead
==========  =====================================================================================
plain       one process of stock PyTorch; no `MixedPrecisionPolicy`, so no bf16 and fp16 of it
ddp         DistributedDataParallel, with unused parameters; no policy of mixed precision either
fsdp2       rows; refuses 16-bit weights on CPUs, optimizers that need whole parameters (`Muon`)
columns     FSDP2 by columns; as fsdp2
hsdp        FSDP2 with two replicas; as fsdp2, and a mesh without shards is refused
stage0-3    the engine; refuses weights of several dtypes, float64 and complex ones, parameters that
            begin to be trained after it was made (`test_as_given`, `test_frozen_at_a_save`)
offload     stage 3 with the optimizer's state on disk and the weights on the host
==========  =====================================================================================
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import zero_engine
import zero_torch
from tests.support import stock
from tests.support.inside import session_of
from tests.support.plain import summed
from tests.support.world import WorldPool
from zero_checkpoint import weight_hash
from zero_comm.topology import ENV_NODE_RANKS
from zero_contract.errors import ZeroError
from zero_data.global_batch import BatchShape, mix, plan_epoch, sample_ids
from zero_data.lanes.adapters import reads_lanes
from zero_engine.sharding.weights import whole_weights
from zero_step import Session

SAMPLES, MICROBATCHES, STEPS, SAVED_AT = 29, 5, 4, 2
"""Steps of 10, 10, 9 and 10 samples, in micro-batches of 2; a checkpoint in the middle."""
IN = 6
SCALE = 1000.0
"""Of the loss in fp16: no power of two, so taking it out again rounds."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The engine's, and those of a `MixedPrecisionPolicy` of FSDP2, which keeps what is frozen in fp32;
the engine keeps it in 16 bits, so there the hashes differ."""
PRECISIONS = ("fp32", "autocast", *DTYPES)

Place = tuple[str, int]
"""A back end, and a world size."""
EVERYWHERE: list[Place] = [
    ("plain", 1),
    *itertools.product(("ddp", "fsdp2"), (1, 2, 3, 4)),
    *(("columns", 1), ("columns", 2), ("columns", 4)),
    *(("hsdp", 1), ("hsdp", 3), ("hsdp", 4)),
    *itertools.product(("stage0", "stage1", "stage2", "stage3"), (1, 2, 3, 4)),
    *(("offload", 1), ("offload", 3)),
]
CORNERS: list[Place] = [
    ("plain", 1),
    ("ddp", 3),
    ("fsdp2", 2),
    ("columns", 4),
    ("hsdp", 4),
    ("stage0", 2),
    ("stage1", 4),
    ("stage2", 1),
    ("stage3", 3),
    ("offload", 2),
]
BACK_ENDS = dict(CORNERS)
"""Each, at a world size that suits it."""
STOCK: list[Place] = [
    ("plain", 1),
    ("ddp", 1),
    ("ddp", 2),
    ("fsdp2", 1),
    ("fsdp2", 2),
    ("hsdp", 4),
]
FEW: list[Place] = [("plain", 1), ("ddp", 2), ("fsdp2", 2), ("stage3", 3)]
"""One of each kind: the fast suite trains there what the full suite trains at the others, too."""
PLACES = pytest.mark.parametrize(
    "places",
    [
        pytest.param(FEW, id="few places"),
        pytest.param(
            [*(place for place in STOCK if place not in FEW), ("stage0", 2)],
            id="the others",
            marks=pytest.mark.full,
        ),
    ],
)


class Net(nn.Module):
    """Matrices of odd sizes, one with a single row, a vector of one element, a 3-dimensional one.

    Returns the mean loss.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(IN, 13), nn.LayerNorm(13), nn.Linear(13, 7)
        self.conv, self.drop, self.head = nn.Conv1d(1, 3, 3), nn.Dropout(0.1), nn.Linear(15, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(self.drop(torch.tanh(self.norm(self.up(x)))))
        x = torch.tanh(self.conv(x.unsqueeze(1))).flatten(1)
        return (self.head(x) - 1.0).square().mean()


def data() -> TensorDataset:
    return TensorDataset(torch.randn(SAMPLES, IN, generator=torch.Generator().manual_seed(3)))


class Everything(stock.GPT):
    """A GPT with a tied head, and what is frozen, seldom used, never used, and no parameter."""

    def __init__(self, *, freezes: bool = True) -> None:
        super().__init__()
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.rand(stock.WIDTH), requires_grad=not freezes)
        self.seldom = nn.Linear(stock.WIDTH, stock.WIDTH)
        self.unused = nn.Parameter(torch.randn(17))
        self.register_buffer("shift", torch.rand(stock.WIDTH))

    def embedded(self, tokens: Tensor) -> Tensor:
        x = super().embedded(tokens) * (1 + self.frozen) + self.shift.to(self.embed.weight.dtype)
        return x + self.seldom(x) if is_seldom(tokens) else x


def is_seldom(tokens: Tensor) -> bool:
    return int(tokens[0, 0]) % 4 == 0


def tokens() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(
        torch.randint(stock.VOCABULARY, (SAMPLES, stock.LENGTH), generator=generator)
    )


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A script."""

    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adam
    model: Callable[[], nn.Module] = Net
    data: Callable[[], Any] = data
    collate: Callable[[list[Any]], tuple[Tensor]] | None = None
    workers: int = 0
    """Loading processes of each rank."""
    of_loader: Mapping[str, Any] = field(default_factory=dict)
    """Further options of the DataLoader, which the engine takes none of."""
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    metric: Callable[[int], float] | None = None
    """What the script steps the scheduler with after a step, which counts from 0."""
    before: Callable[[nn.Module, torch.optim.Optimizer, int], None] | None = None
    """What the script does to its module or optimizer before a step."""
    loss: Callable[[Any, Tensor], Tensor] | None = None
    """What it computes with the model that it calls, if that does not return the loss."""
    within: Callable[[], AbstractContextManager[object]] = nullcontext
    """What the process is like while the script runs."""
    own_loop: bool = False
    """It calls backward() and step() itself."""
    between: Callable[[Any, torch.optim.Optimizer], None] | None = None
    """What it does between a backward and the step."""
    counts: Callable[[Tensor], int] | None = None
    """The tokens of a micro-batch, which then count alike."""
    max_norm: float | None = None
    precision: str = "fp32"
    of_wrapper: tuple[tuple[str, Any], ...] = (("find_unused_parameters", True),)
    """Options of DDP."""
    units: tuple[str, ...] = ("down",)
    """Modules that fully_shard is applied to by themselves."""
    microbatches: int = MICROBATCHES
    """Of a global batch."""
    seed: int = 42
    """Of the order of samples and of dropout."""
    sections: Mapping[str, Any] = field(default_factory=dict)
    """The sections "elastic" and "checkpoint"."""
    nodes: str = ""
    """The ranks of each node."""


WITH_EVERYTHING = Recipe(model=Everything, data=tokens, units=("blocks.0", "blocks.1"))


# ---- the back ends ----


class Training:
    """A training, which loads, trains, saves and leaves alike in every back end."""

    session: Session
    called: Any
    """What the script calls."""
    loader: Any
    optimizer: Any
    scheduler: Any

    def __init__(self, recipe: Recipe, weights: int) -> None:
        torch.manual_seed(weights)
        self.recipe, self.module = recipe, recipe.model()

    @property
    def step(self) -> int:
        raise NotImplementedError

    @property
    def norm(self) -> float | None:
        raise NotImplementedError

    def hash(self) -> str:
        raise NotImplementedError

    def weights(self) -> list[Tensor]:
        """Copies of all whole parameters."""
        raise NotImplementedError

    def backward(self, batch: Tensor) -> None:
        """Forward and backward of a micro-batch."""
        raise NotImplementedError

    def end(self) -> None:
        """The calls after a backward, which end the step if the micro-batch is its last."""
        raise NotImplementedError

    def save(self, directory: str, client: Mapping[str, Any] | None = None) -> bool:
        return self.session.save(directory, client_state=client)

    def load(self, directory: str, tag: str | None = None) -> dict[str, Any]:
        """Returns the client state."""
        self.session.load(directory, tag)
        return self.session.client_state

    def close(self) -> None:
        self.session.close()

    def scheduled(self, optimizer: torch.optim.Optimizer) -> Any:
        return self.recipe.scheduler(optimizer) if self.recipe.scheduler else None

    def compute(self, model: Any, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.recipe.precision == "autocast"):
            loss: Tensor = self.recipe.loss(model, batch) if self.recipe.loss else model(batch)
        return loss

    def count(self, batch: Tensor) -> dict[str, int]:
        return {"tokens": self.recipe.counts(batch)} if self.recipe.counts else {}

    def prepare(self, step: int) -> None:
        if self.recipe.before is not None:
            self.recipe.before(self.module, self.optimizer, step)

    def hashes(self, until: int) -> Iterator[str]:
        """Train to a step; the hash after each."""
        return (self.hash() for _ in self.steps(until))

    def steps(self, until: int) -> Iterator[int]:
        """Train to a step; the number of each."""
        while self.step < until:
            at = self.step
            self.prepare(at)
            for (batch,) in self.loader:
                self.backward(batch)
                if self.recipe.between is not None:
                    self.recipe.between(self.called, self.optimizer)
                self.end()
                if self.step > at:
                    break
            if self.recipe.metric:
                self.scheduler.step(self.recipe.metric(at))
            yield self.step

    def train(self, until: int) -> None:
        """Train to a step."""
        for _ in self.steps(until):
            pass


class OfStockTorch(Training):
    """By `zero_torch.protect`."""

    def __init__(self, recipe: Recipe, back_end: str, weights: int) -> None:
        super().__init__(recipe, weights)
        options = dict(recipe.of_wrapper) if back_end == "ddp" else {}
        if recipe.precision in DTYPES:
            options["param_dtype"] = DTYPES[recipe.precision]
        units = map(self.module.get_submodule, recipe.units)
        self.model = self.called = stock.wrap(self.module, back_end, units, **options)
        self.optimizer = recipe.optimizer(self.model)
        self.scheduler = self.scheduled(self.optimizer)
        fp16 = recipe.precision == "fp16"
        elastic = {"seed": recipe.seed, **recipe.sections.get("elastic", {})}
        samples = recipe.data()
        if not isinstance(samples, DataLoader):
            samples = DataLoader(
                samples,
                batch_size=2,
                shuffle=None if reads_lanes(samples) else True,
                collate_fn=recipe.collate,
                num_workers=recipe.workers,
                **recipe.of_loader,
            )
        self.session = self.run = zero_torch.protect(
            self.model,
            self.optimizer,
            samples,
            microbatches=recipe.microbatches,
            scheduler=self.scheduler,
            scaler=torch.amp.GradScaler("cpu", SCALE) if fp16 else None,
            config={**recipe.sections, "elastic": elastic},
        )
        self.loader, self.hash = self.run.loader, self.run.weight_hash

    @property
    def step(self) -> int:
        return self.run.global_step

    @property
    def norm(self) -> float | None:
        return self.run.grad_norm

    def weights(self) -> list[Tensor]:
        return [each.detach().clone() for _, each in self.run._whole_weights()]

    def backward(self, batch: Tensor) -> None:
        loss = self.compute(self.model, batch)
        if self.recipe.own_loop:
            loss.backward()
        else:
            self.run.backward(loss, **self.count(batch))

    def end(self) -> None:
        if not self.recipe.own_loop:
            self.run.step(self.recipe.max_norm)
            return
        if self.recipe.max_norm:
            self.run.clip_grad_norm_(self.recipe.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.scheduler is not None and not self.recipe.metric:
            self.scheduler.step()


class OfEngine(Training):
    """By `zero_engine.initialize`, which steps the scheduler."""

    def __init__(self, recipe: Recipe, back_end: str, weights: int) -> None:
        super().__init__(recipe, weights)
        zero: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": 0}
        if back_end == "offload":
            zero["offload_optimizer"] = zero["offload_param"] = {"device": "cpu"}
        else:
            zero["stage"] = int(back_end.removeprefix("stage"))
        config = {
            "train_batch_size": 2 * recipe.microbatches,
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": recipe.max_norm or 0,
            "zero_optimization": zero,
            "bf16": {"enabled": recipe.precision == "bf16"},
            "fp16": {"enabled": recipe.precision == "fp16", "loss_scale": SCALE},
            "torch_autocast": {"enabled": recipe.precision == "autocast"},
            "seed": recipe.seed,
            **recipe.sections,
        }
        self.optimizer = recipe.optimizer(self.module)
        self.scheduler = self.scheduled(self.optimizer)
        self.engine = self.called = zero_engine.initialize(
            self.module,
            self.optimizer,
            training_data=recipe.data(),
            collate_fn=recipe.collate,
            num_workers=recipe.workers,
            lr_scheduler=None if recipe.metric else self.scheduler,
            config=config,
        )
        self.session = session_of(self.engine)
        self.loader, self.hash = self.engine.training_dataloader, self.engine.weight_hash

    @property
    def step(self) -> int:
        return self.engine.global_steps

    @property
    def norm(self) -> float | None:
        return self.engine.get_global_grad_norm()

    def save(self, directory: str, client: Mapping[str, Any] | None = None) -> bool:
        return self.engine.save_checkpoint(directory, client_state=client)

    def load(self, directory: str, tag: str | None = None) -> dict[str, Any]:
        return self.engine.load_checkpoint(directory, tag)[1]

    def close(self) -> None:
        self.engine.destroy()

    def weights(self) -> list[Tensor]:
        return [each.detach().clone() for _, each in whole_weights(self.engine._core.units)]

    def backward(self, batch: Tensor) -> None:
        loss = self.compute(self.engine, batch)
        if self.recipe.own_loop:
            loss.backward()
        else:
            self.engine.backward(loss, **self.count(batch))

    def end(self) -> None:
        self.engine.step()


def training(recipe: Recipe, back_end: str, weights: int = 0) -> Training:
    """The script under a back end; weights that a checkpoint is to replace have another seed."""
    cls = OfEngine if back_end.startswith(("stage", "offload")) else OfStockTorch
    with pytest.MonkeyPatch.context() as patch:
        if recipe.nodes and dist.get_world_size() > 1:
            patch.setenv(ENV_NODE_RANKS, recipe.nodes)
        return cls(recipe, back_end, weights)


# ---- what becomes of a recipe ----


def by_torch_alone(recipe: Recipe, steps: int = STEPS) -> list[str]:
    """The hash after each step: sums of the gradients of micro-batches, in their order.

    Each micro-batch begins with the buffers of its step; the first one's are left by it.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = recipe.model()
    optimizer = recipe.optimizer(model)
    scheduler = recipe.scheduler(optimizer) if recipe.scheduler else None
    batch = BatchShape(microbatches=recipe.microbatches, micro_batch=2)
    samples, hashes = recipe.data(), []
    plans = itertools.chain(*(plan_epoch(start, batch, SAMPLES) for start in (0, SAMPLES)))
    for step, plan in enumerate(itertools.islice(plans, steps)):
        if recipe.before is not None:
            recipe.before(model, optimizer, step)
        trained = [p for p in model.parameters() if p.requires_grad]
        gradients, buffers = [], [copied(model)]
        for index in range(plan.microbatches):
            microbatch = plan.microbatch(index, 0, 1)
            (x,) = samples[sample_ids(plan, microbatch, SAMPLES, SAMPLES, 42)]
            torch.manual_seed(mix(42, step, index))
            put(model, buffers[0])
            optimizer.zero_grad()
            share = microbatch.size / plan.samples
            with torch.autocast("cpu", torch.bfloat16, enabled=recipe.precision == "autocast"):
                loss = recipe.loss(model, x) if recipe.loss else model(x)
            if recipe.own_loop:
                loss.backward()
                scaled = [
                    torch.zeros_like(p) if p.grad is None else p.grad * share for p in trained
                ]
            else:
                (loss * share).backward()
                scaled = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
            gradients.append(scaled)
            buffers.append(copied(model))
        put(model, buffers[1])
        for parameter, *addends in zip(trained, *gradients, strict=True):
            parameter.grad = summed(addends, 8).to(parameter.dtype)
        if recipe.between is not None:
            recipe.between(model, optimizer)
        optimizer.step()
        if scheduler is not None:
            scheduler.step(*[recipe.metric(step)] if recipe.metric else [])
        hashes.append(weight_hash(model.named_parameters()))
    return hashes


def copied(model: nn.Module) -> dict[str, Tensor]:
    """What its buffers hold."""
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def put(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Set its buffers."""
    for name, value in buffers.items():
        owner, _, key = name.rpartition(".")
        model.get_submodule(owner)._buffers[key] = value.clone()


def hashes(recipe: Recipe, back_end: str, steps: int) -> list[str]:
    """The weight hash after each step."""
    own = training(recipe, back_end)
    found = list(own.hashes(steps))
    own.close()
    return found


def everywhere(
    worlds: WorldPool, recipe: Recipe, root: Path, places: Sequence[Place] = STOCK
) -> dict[Place, list[str]]:
    """The hash after each step at each place; where a recipe fails, the error comes last.

    In the middle each place saves a checkpoint, and goes on from that of the place before it.
    """
    found: dict[Place, list[str]] = {}
    for back_end, world in places:
        directory = str(root / f"{back_end}{world}")
        found[back_end, world] = agreed(worlds.run(world, half, recipe, back_end, directory))
    whole = [place for place in places if "Error: " not in found[place][-1]]
    for number, (back_end, world) in enumerate(whole):
        before = str(root / "{}{}".format(*whole[number - 1]))
        found[back_end, world] += agreed(worlds.run(world, half, recipe, back_end, None, before))
    return found


def agreed(ranks: list[list[str]]) -> list[str]:
    """What all ranks have found."""
    assert all(rank == ranks[0] for rank in ranks), ranks
    return ranks[0]


def half(recipe: Recipe, back_end: str, save: str | None, load: str | None = None) -> list[str]:
    """The hash after each step up to SAVED_AT, or of those behind it; the error comes last."""
    warnings.simplefilter("ignore")
    with recipe.within():
        return _half(recipe, back_end, save, load)


def _half(recipe: Recipe, back_end: str, save: str | None, load: str | None) -> list[str]:
    found: list[str] = []
    try:
        own = training(recipe, back_end, weights=1 if load else 0)
        if load:
            own.prepare(SAVED_AT - 1)  # as it was when the checkpoint was saved
            own.load(load)
            assert own.step == SAVED_AT
        found.extend(own.hashes(STEPS if load else SAVED_AT))
        if save:
            own.save(save)
        own.close()
    except ZeroError as error:
        found.append(f"{type(error).__name__}: {error}")
    return found
