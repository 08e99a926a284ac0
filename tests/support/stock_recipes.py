"""Scripts of stock PyTorch as recipes, and their bits: by torch alone, and under `zero_torch`."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import zero_torch
from tests.support.plain import summed
from tests.support.world import WorldPool
from zero_checkpoint import weight_hash
from zero_contract.errors import ZeroError
from zero_data.global_batch import BatchShape, mix, plan_epoch, sample_ids

SAMPLES, MICROBATCHES, STEPS, SAVED_AT = 29, 5, 4, 2
"""Steps of 10, 10, 9 and 10 samples, in micro-batches of 2; a checkpoint in the middle."""
IN = 6


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


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A script."""

    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    model: Callable[[], nn.Module] = Net
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    metric: Callable[[int], float] | None = None
    """What the script steps the scheduler with after a step, which counts from 0."""
    before: Callable[[nn.Module, torch.optim.Optimizer, int], None] | None = None
    """What the script does to its module or optimizer before a step."""
    own_loop: bool = False
    """It calls backward() and step() itself."""
    max_norm: float | None = None
    of_wrapper: tuple[tuple[str, Any], ...] = ()
    """Options of DDP."""
    units: tuple[str, ...] = ("down",)
    """Modules that fully_shard is applied to by themselves."""


def data() -> TensorDataset:
    return TensorDataset(torch.randn(SAMPLES, IN, generator=torch.Generator().manual_seed(3)))


def by_torch_alone(recipe: Recipe) -> list[str]:
    """The hash after each step: sums of the gradients of micro-batches, in their order."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = recipe.model()
    optimizer = recipe.optimizer(model)
    scheduler = recipe.scheduler(optimizer) if recipe.scheduler else None
    samples, batch, hashes = data(), BatchShape(microbatches=MICROBATCHES, micro_batch=2), []
    plans = itertools.chain(*(plan_epoch(start, batch, SAMPLES) for start in (0, SAMPLES)))
    for step, plan in enumerate(itertools.islice(plans, STEPS)):
        if recipe.before is not None:
            recipe.before(model, optimizer, step)
        trained = [p for p in model.parameters() if p.requires_grad]
        gradients = []
        for index in range(plan.microbatches):
            microbatch = plan.microbatch(index, 0, 1)
            (x,) = samples[sample_ids(plan, microbatch, SAMPLES, SAMPLES, 42)]
            torch.manual_seed(mix(42, step, index))
            optimizer.zero_grad()
            share = microbatch.size / plan.samples
            if recipe.own_loop:
                model(x).backward()
                scaled = [
                    torch.zeros_like(p) if p.grad is None else p.grad * share for p in trained
                ]
            else:
                (model(x) * share).backward()
                scaled = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
            gradients.append(scaled)
        for parameter, *addends in zip(trained, *gradients, strict=True):
            parameter.grad = summed(addends, 8).to(parameter.dtype)
        optimizer.step()
        if scheduler is not None:
            scheduler.step(*[recipe.metric(step)] if recipe.metric else [])
        hashes.append(weight_hash(model.named_parameters()))
    return hashes


def wrap(model: nn.Module, wrapper: str, recipe: Recipe) -> nn.Module:
    if wrapper == "ddp":
        return DistributedDataParallel(
            model, **{"bucket_cap_mb": 0.0005, **dict(recipe.of_wrapper)}
        )
    if wrapper in ("fsdp2", "hsdp"):
        world = torch.distributed.get_world_size()
        shape = (2, world // 2) if wrapper == "hsdp" else (world,)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
        for module in (*map(model.get_submodule, recipe.units), model):
            fully_shard(module, mesh=mesh)
    return model


Place = tuple[str, int]
"""A wrapper and a world size."""
PLACES: list[Place] = [
    ("plain", 1),
    ("ddp", 1),
    ("ddp", 2),
    ("fsdp2", 1),
    ("fsdp2", 2),
    ("hsdp", 4),
]


def everywhere(
    worlds: WorldPool, recipe: Recipe, root: Path, places: Sequence[Place] = PLACES
) -> dict[Place, list[str]]:
    """The hash after each step at each place; where a recipe fails, the error comes last.

    In the middle each place saves a checkpoint, and goes on from that of the place before it.
    """
    found: dict[Place, list[str]] = {}
    for wrapper, world in places:
        directory = str(root / f"{wrapper}{world}")
        found[wrapper, world] = _agreed(worlds.run(world, protected, recipe, wrapper, directory))
    whole = [place for place in places if not _failed(found[place])]
    for number, (wrapper, world) in enumerate(whole):
        before = str(root / "{}{}".format(*whole[number - 1]))
        rest = worlds.run(world, protected, recipe, wrapper, None, before)
        found[wrapper, world] += _agreed(rest)
    return found


def _failed(hashes: list[str]) -> bool:
    return "Error: " in hashes[-1]


def _agreed(ranks: list[list[str]]) -> list[str]:
    assert all(rank == ranks[0] for rank in ranks), ranks
    return ranks[0]


def protected(recipe: Recipe, wrapper: str, save: str | None, load: str | None = None) -> list[str]:
    """The hash after each step up to SAVED_AT, or of those behind it; the error comes last."""
    warnings.simplefilter("ignore")
    hashes: list[str] = []
    try:
        _train(recipe, wrapper, save, load, hashes)
    except ZeroError as error:
        hashes.append(f"{type(error).__name__}: {error}")
    return hashes


def _train(
    recipe: Recipe, wrapper: str, save: str | None, load: str | None, hashes: list[str]
) -> None:
    torch.manual_seed(1 if load else 0)
    module = recipe.model()
    model = wrap(module, wrapper, recipe)
    optimizer = recipe.optimizer(model)
    scheduler = recipe.scheduler(optimizer) if recipe.scheduler else None
    loader = DataLoader(data(), batch_size=2, shuffle=True)
    run = zero_torch.protect(
        model, optimizer, loader, microbatches=MICROBATCHES, scheduler=scheduler
    )
    before = recipe.before or (lambda *_: None)
    if load:
        before(module, optimizer, SAVED_AT - 1)  # as it was when the checkpoint was saved
        assert run.load(load)
    while run.global_step < (STEPS if load else SAVED_AT):
        at = run.global_step
        before(module, optimizer, at)
        for (x,) in run.loader:
            if recipe.own_loop:
                optimizer.zero_grad()
                model(x).backward()
                optimizer.step()
            else:
                run.backward(model(x))
                run.step(recipe.max_norm)
            if scheduler is not None and (recipe.own_loop or recipe.metric):
                scheduler.step(*[recipe.metric(at)] if recipe.metric else [])
            if run.global_step > at:
                break
        hashes.append(run.weight_hash())
    if save:
        run.save(save)
    run.close()
