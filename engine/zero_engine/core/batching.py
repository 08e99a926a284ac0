"""Which micro-steps make a step, and the loaders that feed them: the engine's part of it.

Must always hold: where the engine loads the batches, the global batch decides where a step ends,
whatever the script says; it changes between steps only. A base of `engine.Engine`, which sets the
attributes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import Dataset, Sampler

from zero_contract.errors import ConfigError, ZeroError
from zero_data.global_batch import BatchShape
from zero_data.own_loader import LeafBatches
from zero_engine.config import Config
from zero_engine.core.loaders import Collate, evaluation_loader, leaf_sampler, training_loader
from zero_engine.core.micro_steps import MicroSteps
from zero_engine.parts import Core, Run


class Batching:
    """The part of an engine that a script accumulates and loads with."""

    training_dataloader: Any
    _config: Config
    _core: Core
    _run: Run
    _micro_steps: MicroSteps

    @property
    def loaded_samples(self) -> int | None:
        """How many samples a step had in the run of the loaded checkpoint.

        0 if nobody knows, None if none was loaded with its position.
        """
        return self._run.loaded_samples

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Micro-steps without `step()`, for scripts that accumulate by themselves.

        Gradients are exchanged all the same: leaf by leaf is how the result stays one. Where more
        micro-steps are run here than the config's batch has, a step is from then on what the script
        accumulates until it calls `step()`, as in DeepSpeed and DDP.

        Raises:
            ZeroError: At stages 2 and 3, as in DeepSpeed.
        """
        if self._core.stage.shards_gradients:
            raise ZeroError(
                f"no_sync() does not go with divided gradients, stage {self._core.stage.number}; "
                "leave it out, or use stage 0 or 1"
            )
        with self._micro_steps.no_sync():
            yield

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """All backwards of a step, at any stage, without a `step()` between them; one follows."""
        self._need_managed("coalesce_grad_reduction()")
        with self._micro_steps.coalesce():
            yield

    def _need_managed(self, what: str) -> None:
        if not self._config.managed_gradient_accumulation:
            raise ZeroError(
                f"{what}: with managed_gradient_accumulation: false a step ends where step() is "
                "called; leave it out"
            )

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say whether the coming micro-steps end a step.

        With a loader of the script's own that decides, from the first call on: as many
        micro-steps as were run make a step, and a `step()` that is to end none does nothing.
        With the engine's, the global batch decides, so that the samples of a step do not depend
        on the world; what is said is checked at the next backward.
        """
        self._need_managed("set_gradient_accumulation_boundary()")
        if self._run.loader is None:
            self._micro_steps.let_script_decide()
        self._micro_steps.declared_boundary = is_boundary

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the samples per step, from the next step on.

        Raises:
            ConfigError: Not a multiple of the micro-batch size.
            ZeroError: In the middle of a step.
        """
        micro_batch = self._run.batch.micro_batch
        if train_batch_size < 1 or train_batch_size % micro_batch:
            raise ConfigError(
                f"set_train_batch_size({train_batch_size}): not a multiple of the micro-batch "
                f"size {micro_batch}"
            )
        if isinstance(self._run.loader, LeafBatches):
            raise ZeroError(
                "set_train_batch_size(): what a loader of your own has prefetched cannot be taken "
                "back; use the loader of initialize() or deepspeed_io()"
            )
        if self._run.cursor.micro or self._micro_steps.awaits_step:
            raise ZeroError("set_train_batch_size() in the middle of a step; call it after one")
        leaves = train_batch_size // micro_batch
        self._run.adopt_batch(BatchShape(leaves=leaves, micro_batch=micro_batch))

    def deepspeed_io(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Sampler[Any] | None = None,
        collate_fn: Collate | None = None,
        num_local_io_workers: int | None = None,
    ) -> Any:
        """A loader: for "train" the engine's own order, for "eval" this rank's plain share.

        `pin_memory` is for DeepSpeed's scripts: batches are pinned where there is a GPU.

        Raises:
            ConfigError: A training batch of another size than the config's, or in another order,
                or another route.
        """
        del pin_memory
        run, workers = self._run, num_local_io_workers or 0
        if route in ("eval", "predict"):
            return evaluation_loader(run, dataset, batch_size, data_sampler, collate_fn, workers)
        if route != "train":
            raise ConfigError(f'deepspeed_io: route {route!r} is not "train", "eval" or "predict"')
        if data_sampler is not None:
            raise ConfigError(
                "deepspeed_io: the engine orders training data; leave data_sampler out"
            )
        if batch_size not in (None, run.batch.micro_batch):
            raise ConfigError(
                f"deepspeed_io: batch_size {batch_size} is not the micro-batch size "
                f"{run.batch.micro_batch}; change train_micro_batch_size_per_gpu"
            )
        run.loader = training_loader(self._config, run, dataset, collate_fn, workers)
        self.training_dataloader = run.loader
        return run.loader

    def batch_sampler(self, dataset: Dataset[Any]) -> LeafBatches:
        """The engine's order for a DataLoader of your own: `DataLoader(batch_sampler=...)`.

        Its workers, collate_fn, pinning and prefetching are yours; which samples a rank runs,
        and going on exactly there, is the engine's. Each pass over the DataLoader is the rest of
        an epoch.

        Args:
            dataset: Map-style; the same that the DataLoader gets.
        """
        sampler = LeafBatches(leaf_sampler(self._config, self._run, dataset))
        self._run.loader = sampler
        return sampler
