"""torchtitan's Trainer on `zero_torch.Run`: the config of a training, protected.

    def my_training() -> Trainer.Config:   # in a module of configs
        config = llama3_8b()
        config.training.global_batch_size = 64
        return zero_libraries.torchtitan.protect(config)

The run takes the place of torchtitan's checkpointer, and of the body of a step: batches are those
that torchtitan's loader would have on `global_batch_size / local_batch_size` ranks, whatever the
number of ranks. Parallelism, model, optimizer, schedule, metrics and validation are torchtitan's.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX, ChunkedLossWrapper
from torchtitan.trainer import Trainer

import zero_torch
from zero_comm.worker.agent_link import note_total_steps
from zero_contract.errors import ConfigError
from zero_libraries.versions import check_replaced

_log = logging.getLogger(__name__)
_REPLACED = ("train_step", "batch_generator", "_forward_backward_body")
"""Methods of a Trainer in whose place a run is."""
_DEGREES = ("tensor_parallel", "context_parallel", "pipeline_parallel", "expert_parallel")
_REFUSED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    *((f"parallelism.{each}_degree", lambda value: value > 1,
       "divides a micro-batch among ranks: zero_torch.protect(model, optimizer) keeps its "
       "checkpoints, and torchtitan the data and the step") for each in _DEGREES),
    ("training.global_batch_size", lambda value: value < 1,
     "would follow the number of ranks: give the samples of a step"),
    ("optimizer.implementation", lambda value: value == "fused_opt_states_bf16",
     "has states that only the fused kernel can step, which rounds the end of a shard "
     "differently: give 'foreach'"),
    ("checkpoint.load_step", lambda value: value != -1,
     "is not used: a run resumes by itself, from its newest checkpoint"),
    ("checkpoint.create_seed_checkpoint", bool,
     "makes a model that is not sharded: make the seed checkpoint by the config as it was"),
)  # fmt: skip
"""A field of the config, what of it is refused, and the reason with the remedy."""


def protect(given: Trainer.Config, *, config: Mapping[str, Any] | None = None) -> Trainer.Config:
    """The same training, with the same bits at every world size, and a resume by itself.

    What it builds is a Trainer of the given one's class. Its `run` is the `zero_torch.Run`, whose
    checkpoints are in `dump_folder`/run. torchtitan's own checkpointer loads the weights to begin
    with (`checkpoint.initial_load_path`), and exports those at the end
    (`checkpoint.last_save_model_only`).

    Args:
        given: Of `torchtitan.trainer.Trainer`, or of a class that derives from it; flags of the
            command line change it afterwards, as ever.
        config: As for `zero_torch.protect`; by default `elastic.seed` is `debug.seed`, and
            `checkpoint.every_steps` is `checkpoint.interval`, if `checkpoint.enable` is set.

    Raises:
        ConfigError: The class has a step of its own.
    """
    kind = type(given)
    base: Any = kind._owner
    check_replaced("torchtitan", Trainer, _REPLACED)
    for name in _REPLACED:
        if getattr(base, name) is not getattr(Trainer, name):
            raise ConfigError(
                f"{base.__name__}.{name}() takes the place of torchtitan's, and so does a run: "
                "leave one of them out"
            )

    @dataclass(kw_only=True, slots=True)
    class Config(kind):  # type: ignore[valid-type,misc]
        pass

    body = {"Config": Config, "_zero": dict(config or {}), "__module__": base.__module__}
    # torchtitan notes the class as the owner of its Config, which builds one of it.
    type(base.__name__, (_Protected, base), body)
    made: Trainer.Config = Config(**{each.name: getattr(given, each.name) for each in fields(kind)})
    return made


def check(config: Trainer.Config) -> None:
    """Check the config of a training, after the flags of the command line.

    Raises:
        ConfigError: A field cannot be kept; names it.
    """
    for name, refused, why in _REFUSED:
        section, _, key = name.partition(".")
        value = getattr(getattr(config, section), key, None)
        if value is not None and refused(value):
            raise ConfigError(f"{name}={value!r}: {key} {why}")
    batch, micro_batch = config.training.global_batch_size, config.training.local_batch_size
    if batch % micro_batch:
        raise ConfigError(
            f"training.global_batch_size={batch} is no multiple of local_batch_size={micro_batch}: "
            "a step has whole micro-batches"
        )


class _Lanes(BaseDataLoader):
    """Makes the dataset of a lane, as torchtitan makes that of a rank."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        given: BaseDataLoader.Config

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, **more: Any) -> None:
        self._given, self._more = config.given, more
        loader = self._of(0, 1)
        if not isinstance(loader, DataLoader):
            raise ConfigError(
                f"dataloader: {type(loader).__name__} is no DataLoader of torch, so lanes cannot "
                "read its dataset"
            )
        names = ("collate_fn", "num_workers", "pin_memory", "prefetch_factor")
        self.loader: DataLoader[Any] = DataLoader(
            self._dataset_of,  # type: ignore[arg-type] # a function of (lane, lanes)
            loader.batch_size,
            **{name: getattr(loader, name) for name in names},
        )

    def _of(self, lane: int, lanes: int) -> Any:
        return self._given.build(dp_rank=lane, dp_world_size=lanes, **self._more)

    def _dataset_of(self, lane: int, lanes: int) -> Any:
        return self._of(lane, lanes).dataset

    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError("the run reads it")

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the run has the position."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing."""


class _Saves:
    """The run in the place of torchtitan's checkpointer."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._run: zero_torch.Run = trainer.run
        self._given = trainer.checkpointer
        self._directory = os.path.join(trainer.config.dump_folder, "run")

    def load(self, step: int = -1) -> bool:
        """Resume; the first time begin with the weights that torchtitan loads.

        Raises:
            ConfigError: There are checkpoints of a training that was not protected.
        """
        trainer, run = self._trainer, self._run
        found = run.load(self._directory) is not None or self._given.load(step)
        if trainer.step and not run.global_step:
            raise ConfigError(
                f"checkpoint.folder={trainer.config.checkpoint.folder!r} has step {trainer.step} "
                "of a training that was not protected, whose position in the data is lost at "
                "another number of ranks: give its weights as checkpoint.initial_load_path, and "
                "another folder"
            )
        trainer.step, trainer.ntokens_seen = run.global_step, run.tokens
        return bool(found)

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        """Save if that is due, and leave if asked to."""
        saved = self._run.save_if_due(self._directory)
        if last_step:
            saved = saved or self._run.save(self._directory)
            if self._trainer.config.checkpoint.last_save_model_only:
                self._given.save(curr_step, last_step=True)
        return saved

    def maybe_wait_for_staging(self) -> None:
        """Nothing: the run waits by itself."""

    def close(self) -> None:
        """Finish the last save."""
        self._given.close()
        self._run.close()


class _Protected(Trainer):
    """The methods of a Trainer that a run takes over; comes before the class of the script."""

    run: zero_torch.Run
    _zero: Mapping[str, Any]

    def __init__(self, config: Any) -> None:
        """Build what torchtitan builds, then the run on it."""
        check(config)
        batch, settings = config.training.global_batch_size, _settings(config, self._zero)
        self._tokens = 0
        super().__init__(_for_any_world(config, settings["elastic"]["seed"]))
        if len(self.optimizers.optimizers) != 1:
            raise ConfigError("optimizer: param_groups of several optimizers; a run has one")
        lanes: Any = self.dataloader
        self.run = zero_torch.protect(
            self.model_parts[0],
            self.optimizers.optimizers[0],
            lanes.loader,
            microbatches=batch // config.training.local_batch_size,
            scheduler=self.lr_schedulers.schedulers[0],
            config=settings,
        )
        its: Any = self
        its.checkpointer = _Saves(self)
        note_total_steps(config.training.steps)

    def batch_generator(self, data_iterable: Any) -> Any:
        """The micro-batches of this rank, in the first epoch, which most data do not end."""
        loader = self.run.loader
        return super().batch_generator(loader if loader.epoch == 0 else ())

    def train_step(self, data_iterator: Any) -> None:
        """Run the micro-batches of a step; the last one acts."""
        run, rates = self.run, self.lr_schedulers.get_metrics()
        while True:
            inputs, labels = next(data_iterator)
            for key, value in inputs.items():
                if isinstance(value, Tensor):
                    inputs[key] = value.to(self.device)
            # Without a label there is no mean.
            self._tokens = max(int((labels != IGNORE_INDEX).sum()), 1)
            self.forward_backward_step(
                input_dict=inputs,
                labels=labels.to(self.device),
                global_valid_tokens=torch.tensor(self._tokens, device=self.device),
            )
            if run.step(max_norm=self.config.training.max_norm):
                break
        run.due()  # all ranks know the loss from here on
        self.ntokens_seen = run.tokens
        if self.metrics_processor.should_log(self.step):
            more = {"n_tokens_seen": run.tokens, **rates}
            norm = run.grad_norm or 0.0
            self.metrics_processor.log(self.step, run.loss, run.loss, norm, extra_metrics=more)

    def _forward_backward_body(
        self, inputs: Tensor, labels: Tensor, global_valid_tokens: Tensor, extra_kwargs: Any
    ) -> Tensor:
        with self.train_context():
            found = self.model_parts[0](inputs, **extra_kwargs)
            with_it = {key: extra_kwargs[key] for key in ("positions",) if key in extra_kwargs}
            loss, _ = self.loss_fn(found, labels, global_valid_tokens, **with_it)
            del found
            self.run.backward(loss, tokens=self._tokens)
        return loss


def _settings(config: Trainer.Config, given: Mapping[str, Any]) -> dict[str, Any]:
    saves: Any = config.checkpoint
    every = {"every_steps": saves.interval} if saves.enable else {}
    seed = config.debug.seed if config.debug.seed is not None else 0
    return {
        "elastic": {"seed": seed, **given.get("elastic", {})},
        "checkpoint": given.get("checkpoint", every),
    }


def _for_any_world(config: Any, seed: int) -> Any:
    """The config that torchtitan may build at any world size, and whose step can be divided."""
    if not config.training.disable_cuda_graphs:
        _log.warning("training.disable_cuda_graphs is set: a captured backward reduces nothing")
    if isinstance(config.loss, ChunkedLossWrapper.Config):
        _log.warning(
            "loss: ChunkedLossWrapper runs a backward for each chunk of a micro-batch, and a run "
            "has one: %s is used on all logits at once",
            type(config.loss.loss_fn).__qualname__,
        )
        config = replace(config, loss=config.loss.loss_fn)
    return replace(
        config,
        training=replace(config.training, global_batch_size=-1, disable_cuda_graphs=True),
        debug=replace(config.debug, seed=seed),
        dataloader=_Lanes.Config(given=config.dataloader),
    )
