"""A config in words: the resolved values, the keys without effect, warnings, and the memory.

What `initialize` would refuse is refused here, in the same words, because the same functions make
it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from zero_comm.topology import alone, described
from zero_contract.errors import ConfigError
from zero_contract.sections import AUTO
from zero_data.global_batch import BatchShape, resolve_batch
from zero_engine.config import Config, OptimizerConfig, SchedulerConfig
from zero_engine.config.elasticity import choose_batch
from zero_engine.config.keys import ALIASES, WRITTEN
from zero_engine.config.parse import without_effect
from zero_engine.layout import Facts, resolve
from zero_engine.observe.memory import estimate, is_stepped_whole, optimizer_states
from zero_engine.optim.lr_schedules import make_schedule
from zero_engine.optim.optimizers import describe, make_optimizer

WORLDS = (1, 2, 4, 8, 16, 32, 64)
_COLUMNS = ("weights", "master", "moments", "gradients", "total", "host", "disk")
_GIB = 1 << 30
_MODULES = 32
"""The modules, of equal size, of a model whose largest module is not given."""


def explain(
    config: Config,
    written: Mapping[str, Any],
    parameters: int,
    largest: int | None = None,
    node_ranks: int | None = None,
) -> Iterator[str]:
    """The whole explanation, line by line; `written` is the JSON that the config was made from.

    Of what is not given, the largest module is a 32nd of all parameters, and there is one node.
    """
    yield "Resolved values (* from the file):"
    yield from _values(config, _leaves(written))
    if inert := without_effect(written):
        yield "\nWithout effect here:"
        yield from (f"  {path}: {reason}" for path, reason in inert.items())
    if config.elasticity.enabled:
        chosen = choose_batch(config.elasticity)
        yield (
            f"\nElasticity: {chosen.samples} samples in micro-batches of {chosen.micro_batch}; "
            f"no rank idles in these {len(chosen.worlds)} worlds, and every other trains as well:"
        )
        yield f"  {', '.join(str(world) for world in chosen.worlds)}"
    ranks = node_ranks or 1
    # As NCCL, which matches exchanges by their order alone.
    facts = Facts(topology=described(str(ranks), 2 * ranks), device="cuda", any_order=False)
    yield f"\nOn two nodes of {ranks} GPUs:"
    yield from (f"  {choice}" for choice in resolve(config, facts).choices)
    if warnings := list(_warnings(config)):
        yield "\nWarnings:"
        yield from (f"  {warning}" for warning in warnings)
    yield f"\nPer rank, {parameters:,} trained parameters, stage {config.zero_optimization.stage}:"
    largest = largest or -(-parameters // _MODULES)
    yield f"  ranks {' '.join(f'{name:>9}' for name in _COLUMNS)}   GiB; micro-steps, busy"
    in_flight = 0
    for world in WORLDS:
        memory = estimate(config, parameters, world, largest, node_ranks)
        in_flight = max(in_flight, memory.in_flight)
        columns = (getattr(memory, name) for name in _COLUMNS)
        numbers = " ".join(f"{size / _GIB:9.2f}" for size in columns)
        # The micro-steps of a step, and the part of them in which a rank is not idle.
        if config.train_batch_size is None and config.train_micro_batch_size_per_gpu is None:
            work = "no batch size is given"
        else:
            try:
                microbatches = _batch(config, world)[0].microbatches
                micro_steps = -(-microbatches // world)
                work = f"{micro_steps}, {microbatches / (world * micro_steps):.0%}"
            except ConfigError:
                work = "this world does not divide the batch"
        yield f"  {world:5d} {numbers}   {work}"
    yield (
        "The first five columns are the device's memory; without a GPU it is the host's as well.\n"
        "On top come activations, and modules being gathered and reduced: at most "
        f"{in_flight / _GIB:.2f} GiB,\nif the largest module has {largest:,} parameters."
    )


def resolved(config: Config) -> Iterator[str]:
    """Every key and its resolved value."""
    return (line.strip() for line in _values(config, set()))


def check_sections(config: Config) -> None:
    """Make the optimizer and the schedule of a config, for the smallest model.

    Raises:
        ConfigError: As `initialize` does, for what does not depend on the model.
    """
    schedule = config.scheduler or SchedulerConfig()
    if schedule.params.get("total_num_steps") == AUTO:  # a library fills it in, which knows it
        schedule = replace(schedule, params={**schedule.params, "total_num_steps": 1})
    # A schedule with a list of rates has one for each param group.
    rates = (len(each) for each in schedule.params.values() if isinstance(each, list))
    layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(max(rates, default=1)))
    groups = [{"params": list(layer.parameters())} for layer in layers]
    section = config.optimizer or OptimizerConfig(type="SGD")  # the script makes its optimizer
    optimizer = make_optimizer(None, section, groups, layers)
    assert optimizer is not None
    resolve(config, Facts(topology=alone(1), optimizer=describe(optimizer)))
    make_schedule(schedule, optimizer)


def check_batch(config: Config) -> None:
    """Check that a job can begin on some number of ranks. Raises ConfigError."""
    batch, _ = _batch(config, 1)
    accumulation = config.gradient_accumulation_steps or 1
    samples = config.train_batch_size or batch.samples
    # With all three of DeepSpeed's numbers a job begins on one number of ranks, if on any.
    begins_nowhere = samples % (batch.micro_batch * accumulation)
    _batch(config, 1, first_round=bool(begins_nowhere))


def _leaves(data: Mapping[str, Any], parent: str = "") -> set[str]:
    """The paths of the fields that a config sets, whatever the spelling of their keys."""
    found = set()
    for key, value in data.items():
        path = f"{parent}{ALIASES.get(f'{parent}{key}', key)}"
        found |= _leaves(value, f"{path}.") if isinstance(value, Mapping) else {path}
    return found


def _values(record: Any, written: set[str], parent: str = "") -> Iterator[str]:
    fields = dataclasses.fields(record)
    if not getattr(record, "enabled", True):
        fields = fields[:1]  # in a section that is off no other key matters
    for field in fields:
        path, value = f"{parent}{field.name}", getattr(record, field.name)
        if dataclasses.is_dataclass(value):
            yield from _values(value, written, f"{path}.")
        else:
            # "optimizer.params.lr" gives optimizer.params, "zero_optimization": true its stage.
            given = any(
                f"{name}.".startswith(f"{path}.") or f"{path}.".startswith(f"{name}.")
                for name in written
            )
            shown = json.dumps(value, default=str)
            yield f"  {'*' if given else ' '} {WRITTEN.get(path, path)} = {shown}"


def _batch(config: Config, world: int, *, first_round: bool = False) -> tuple[BatchShape, bool]:
    return resolve_batch(
        config.train_batch_size,
        config.train_micro_batch_size_per_gpu,
        config.gradient_accumulation_steps,
        world,
        first_round=first_round,
    )


def _warnings(config: Config) -> Iterator[str]:
    yield from _about_the_batch(config)
    if config.scheduler is not None and AUTO in config.scheduler.params.values():
        yield (
            '"auto" in scheduler.params is a default here, and total_num_steps has none: the '
            "Hugging Face Trainer fills them in, other scripts must"
        )
    if config.optimizer is None:
        yield "no optimizer: give one to initialize(), or nothing is trained"
    elif optimizer_states(config.optimizer) is None:
        yield f"optimizer {config.optimizer.type}: its memory is not known; counted as Adam's"
    elif config.optimizer.type.lower() == "muon":
        yield "optimizer Muon: counted as for matrices; embeddings, heads and vectors take Adam's"
    elif is_stepped_whole(config.optimizer):
        yield (
            f"optimizer {config.optimizer.type}: each parameter is stepped whole, by the rank that "
            "owns it; offload_optimizer has no effect on it; its memory is counted as for "
            "matrices, vectors take a value per element"
        )
    if not config.gradient_clipping:
        yield "gradients are not clipped"
    if config.fp16.enabled and config.fp16.loss_scale:
        yield f"the loss scale is fixed at {config.fp16.loss_scale:g}: it will not adapt"
    if config.zero_optimization.stage == 0 and config.compute != "fp32":
        yield "stage 0 keeps all master weights and moments on every rank; stage 1 costs nothing"


def _about_the_batch(config: Config) -> Iterator[str]:
    try:
        if _batch(config, 1)[1]:
            yield (
                "the batch depends on the number of ranks of the first start, and stays as it was "
                "then; set train_batch_size and train_micro_batch_size_per_gpu to fix it here"
            )
        samples, accumulation = config.train_batch_size, config.gradient_accumulation_steps
        micro_batch = config.train_micro_batch_size_per_gpu
        if samples is not None and micro_batch is not None and accumulation is not None:
            # With all three of DeepSpeed's numbers a job can begin on one number of ranks only.
            ranks, rest = divmod(samples, micro_batch * accumulation)
            on_ranks = f"on {ranks} rank{'s' if ranks > 1 else ''} only"
            yield (
                f"gradient_accumulation_steps is {accumulation}: with both batch sizes the job can "
                f"begin {'on no number of ranks' if rest else on_ranks}, and continue with any; "
                "leave it out to begin with any as well"
            )
    except ConfigError as error:
        yield str(error)
    if not config.managed_gradient_accumulation:
        yield (
            "managed_gradient_accumulation is false: a step ends where the script calls step(), so "
            "the global batch follows from the script and the number of ranks"
        )
