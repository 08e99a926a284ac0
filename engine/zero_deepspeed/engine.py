"""DeepSpeed's engine: the methods that only DeepSpeed's users expect, under its names.

Must always hold: `Engine` trains, saves and loads; a number is that of the whole run, never of this
rank; an exported model is whole at every stage.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Sampler

from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.tools.conversion.export import read_state_dict, select
from zero_checkpoint.tools.locate import one
from zero_comm.worker.agent_link import exit_on_peer_loss
from zero_contract.errors import ConfigError, ZeroError
from zero_data.global_batch import BatchShape
from zero_data.own_loader import MicroBatches
from zero_data.position_loader import LoopCalls
from zero_deepspeed.checkpoint.tags import alias
from zero_deepspeed.export import frozen, write_weights
from zero_deepspeed.loaders import evaluation_loader
from zero_deepspeed.profiling.flops_profiler import FlopsProfiler
from zero_deepspeed.version import __version__
from zero_engine.core.engine import Engine
from zero_engine.core.loaders import Collate, training_loader
from zero_engine.core.micro_steps import EndsBy, Loss
from zero_engine.offload_states import WEIGHTS
from zero_engine.parameters.gather import GatheredParameters
from zero_engine.sharding.grad_reducer import if_alive
from zero_engine.sharding.weights import state, state_table


class Asserted(ConfigError, AssertionError):
    """What DeepSpeed asserts, which scripts may catch as such."""


def _need_a_scalar(call: str, loss: Loss) -> None:
    value = loss[0] if isinstance(loss, tuple) else loss
    if not isinstance(value, Tensor) or value.numel() != 1:
        shape = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise Asserted(
            f"{call}: the loss must be a scalar tensor, and is of {shape}; give its mean, or "
            "(its sum, the number of its tokens)"
        )


class Epochs:
    """DeepSpeed's throughput timer, which scripts notify of their epochs."""

    def update_epoch_count(self) -> None:
        """Do nothing: steps are timed, not epochs."""


class DeepSpeedEngine(Engine):
    """The engine with DeepSpeed's arguments, getters and setters."""

    tput_timer = Epochs()

    def sparse_gradients_enabled(self) -> bool:
        """Whether the config asks for them; gradients travel with their unit all the same."""
        return bool(self.config.get("sparse_gradients"))

    @property
    def sparse_tensor_module_names(self) -> set[str]:
        """The weights of embeddings, if the config asks for sparse gradients."""
        kinds = nn.Embedding, nn.EmbeddingBag
        named = self.module.named_modules() if self.sparse_gradients_enabled() else ()
        return {f"{name}.weight" for name, module in named if isinstance(module, kinds)}

    @property
    def flops_profiler(self) -> FlopsProfiler:
        """The operations of the last forward in the profiled step; there if the config asks."""
        if not self._config.flops_profiler.enabled:
            raise AttributeError('flops_profiler: give the section "flops_profiler" in the config')
        return FlopsProfiler.of_engine(self.module, self._profile.of_forward)

    def empty_partition_cache(self) -> None:
        """Do nothing: parameters are released after every use."""

    # ---- a step: what DeepSpeed asserts begins with its own words, which scripts look for ----

    def backward(
        self,
        loss: Loss,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
        *,
        tokens: int | Tensor | None = None,
        by_share: bool = True,
    ) -> Tensor:
        """Compute and reduce the gradients of one micro-step; see `Engine.backward`.

        Args:
            loss: The mean loss of this micro-batch, or (sum, count).
            retain_graph: As for Tensor.backward.
            scale_wrt_gas: DeepSpeed's name for `by_share`.
            tokens: The number of tokens in the mean.
            by_share: Weight the loss by the micro-batch's share of the global batch.
        """
        _need_a_scalar("backward()", loss)
        by_share = by_share and scale_wrt_gas
        return super().backward(loss, retain_graph, tokens=tokens, by_share=by_share)

    def scale(self, loss: Loss, *, tokens: int | Tensor | None = None) -> Tensor:
        """The loss, weighted and scaled, for the script to call `.backward()` on."""
        _need_a_scalar("scale()", loss)
        return super().scale(loss, tokens=tokens)

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End a micro-step; see `Engine.step`.

        Raises:
            Asserted: Within `no_sync` or `coalesce_grad_reduction`.
        """
        if self._micro_steps.ends_by is not EndsBy.STEP:
            raise Asserted(
                "It is illegal to call Engine.step() inside no_sync context manager, or inside "
                "coalesce_grad_reduction(); leave it for after the context"
            )
        super().step(lr_kwargs)

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """A context for all backwards of a step, at any stage, with one `step()` after it.

        Raises:
            Asserted: Within itself or `no_sync`, or if `step()` ends every step.
        """
        self._need_managed("coalesce_grad_reduction()")
        if self._micro_steps.ends_by is not EndsBy.STEP:
            raise Asserted(
                "coalesce_grad_reduction() cannot be nested in itself or in no_sync(); leave the "
                "inner one out"
            )
        with self._micro_steps.ending_by(EndsBy.COALESCE):
            yield

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """See `Engine.no_sync`.

        Raises:
            Asserted: Within itself or `coalesce_grad_reduction`, or at stages 2 and 3.
        """
        if self._core.stage.shards_gradients:
            raise Asserted(
                "no_sync context manager is incompatible with the sharded gradients of ZeRO stage "
                f"{self._core.stage.number}; leave it out, or use stage 0 or 1"
            )
        if self._micro_steps.ends_by is not EndsBy.STEP:
            raise Asserted(
                "no_sync context manager reentry is unsupported, also inside "
                "coalesce_grad_reduction(); leave the inner one out"
            )
        with super().no_sync():
            yield

    def allreduce_gradients(self, bucket_size: int = 0) -> None:
        """Do nothing: `backward` exchanges gradients, in one order."""
        del bucket_size

    def _need_managed(self, what: str) -> None:
        if not self._config.managed_gradient_accumulation:
            raise Asserted(
                f"{what}: with managed_gradient_accumulation: false a step ends where step() is "
                "called; leave it out"
            )

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Declare whether the coming micro-steps end a step.

        With a DataLoader of the script the declaration decides, from the first call on: a step has
        the micro-steps that were run, and a `step()` that ends none does nothing. With the engine's
        loader the global batch decides, so that the samples of a step do not depend on the world;
        the declaration is checked at the next backward.
        """
        self._need_managed("set_gradient_accumulation_boundary()")
        if self._run.loader is None:
            self._micro_steps.let_script_decide()
        self._micro_steps.declared_boundary = is_boundary

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current micro-step is the last of its step."""
        return self._micro_steps.at_boundary

    def managed_gradient_accumulation(self) -> bool:
        """Whether the global batch decides where a step ends; otherwise `step()` ends one."""
        return self._config.managed_gradient_accumulation

    def was_step_applied(self) -> bool:
        """Whether the last micro-step has changed the weights, and not only accumulated."""
        return self._micro_steps.applied

    @property
    def micro_steps(self) -> int:
        """Micro-steps that this process has run."""
        return self._micro_steps.ended

    # ---- the batch ----

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
        self._adopt_batch("set_train_batch_size()", train_batch_size // micro_batch, micro_batch)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the samples per micro-batch, and with them those per step, from the next step on.

        A step keeps its number of micro-batches.

        Raises:
            ConfigError: Less than 1.
            ZeroError: In the middle of a step.
        """
        if micro_batch_size < 1:
            raise ConfigError(f"set_train_micro_batch_size({micro_batch_size}): less than 1")
        microbatches = self._run.batch.microbatches
        self._adopt_batch("set_train_micro_batch_size()", microbatches, micro_batch_size)

    def _adopt_batch(self, what: str, microbatches: int, micro_batch: int) -> None:
        if isinstance(self._run.loader, MicroBatches):
            raise ZeroError(
                f"{what}: your own DataLoader has prefetched batches of the old size; use the "
                "loader of initialize() or deepspeed_io()"
            )
        if self._micro_steps.is_begun():
            raise ZeroError(f"{what} in the middle of a step; call it after one")
        self._run.adopt_batch(BatchShape(microbatches=microbatches, micro_batch=micro_batch))

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
        """A loader: for "train" in the engine's order, for "eval" with this rank's plain share.

        `pin_memory` is accepted for DeepSpeed's signature: batches are pinned if there is a GPU.

        Raises:
            ConfigError: A training batch differs in size from the config's, or has a sampler; or
                the route is unknown.
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
        loader = training_loader(
            self._config, run, self._core.collectives, dataset, collate_fn, workers
        )
        # The script keeps the loader, which must not keep the engine.
        loader.calls = LoopCalls(*(partial(if_alive(self._hear_loop), loader),) * 3)
        run.loader = self.training_dataloader = loader
        return loader

    @property
    def loaded_samples(self) -> int | None:
        """The samples of a step in the run of the loaded checkpoint.

        0 if unknown, None if no checkpoint was loaded with its position.
        """
        return self._run.loaded_samples

    @property
    def dp_world_size(self) -> int:
        """The number of data-parallel ranks: all ranks."""
        return self.world_size

    def train_batch_size(self) -> int:
        """Samples per full step; the same at every world size."""
        return self._run.batch.samples

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per micro-batch."""
        return self._run.batch.micro_batch

    def gradient_accumulation_steps(self) -> int:
        """Micro-steps of a full step at this world size."""
        # Rounded up: a rank that has no micro-batch left runs a padding one.
        return -(-self._run.batch.microbatches // self.world_size)

    def get_batch_info(self) -> tuple[int, int, int]:
        """Samples per step, samples per micro-batch, micro-steps."""
        return (
            self.train_batch_size(),
            self.train_micro_batch_size_per_gpu(),
            self.gradient_accumulation_steps(),
        )

    # ---- checkpoints and exports ----

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | float | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        client_sd: Mapping[str, Any] | None = None,
        blocking: bool | None = None,
    ) -> bool:
        """See `Engine.save_checkpoint`; `client_sd` is `client_state` in DeepSpeed's tutorials."""
        state = client_state or client_sd
        flags = save_latest, exclude_frozen_parameters
        return super().save_checkpoint(save_dir, tag, state, *flags, blocking=blocking)

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | float | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., object] | None = None,
    ) -> tuple[str | None, dict[str, Any]]:
        """See `Engine.load_checkpoint`.

        `custom_load_fn` is called with `src`, the checkpoint's fp32 state_dict, and `dst`, the
        module with gathered parameters; its changes on rank 0 are loaded.
        """
        # Not strict beside a function of the script, which loads what does not match.
        path, client = super().load_checkpoint(
            load_dir,
            alias(load_dir, tag),
            load_module_strict and custom_load_fn is None,
            load_optimizer_states,
            load_lr_scheduler_states,
            load_module_only,
        )
        if path is None:
            return None, client
        if custom_load_fn is not None:
            checkpoint = one(str(path))
            source = read_state_dict(checkpoint, select(checkpoint, dtype=torch.float32))
            with GatheredParameters(self.module, modifier_rank=0):
                custom_load_fn(src=source, dst=self.module)
        return path, {"ds_version": __version__, **client}

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the state_dict, in the dtype of the model, unit by unit; every rank calls it.

        Args:
            save_dir: The directory, which is made if missing.
            save_filename: The format is safetensors with the suffix .safetensors, else torch.save.
            exclude_frozen_parameters: Leave out parameters that are not trained.

        Returns:
            True: the file is written, at every stage.

        Raises:
            CheckpointError: The file could not be written.
        """
        core, path, problem = self._core, Path(save_dir) / save_filename, ""
        core.moved.need("save_16bit_model()", WEIGHTS)
        left_out = frozen(core.module) if exclude_frozen_parameters else frozenset[str]()
        table = state_table(core.module, core.units)
        table = {name: entry for name, entry in table.items() if name not in left_out}
        ties = {other: name for other, name in core.aliases.items() if name in table}
        with exit_on_peer_loss(self._link):
            weights = state(core.module, core.units, left_out)
            if self.global_rank == 0:
                problem = write_weights(weights, table, ties, path)
            collections.deque(weights, maxlen=0)  # take part in gathering what others write
            # All ranks raise, or none.
            failed = torch.tensor([float(bool(problem))], device=self.device)
            core.collectives.broadcast(failed, f"whether {path} was written")
        if failed.item():
            raise CheckpointError(problem or f"{path} was not written: see the error of rank 0")
        return True

    save_fp16_model = save_16bit_model

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Whether `save_16bit_model` writes the whole model at stage 3: always."""
        return True

    def _consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, Tensor] | None:
        """The state_dict that `save_16bit_model` writes, for libraries that write it themselves.

        Every rank calls it. As in DeepSpeed rank 0 receives it, and the other ranks None, so that
        only rank 0 needs memory for it.
        """
        left_out = frozen(self.module) if exclude_frozen_parameters else frozenset[str]()
        here = self.global_rank == 0
        whole = self._whole("the consolidated state_dict", here=here, left_out=left_out)
        return whole if here else None

    _zero3_consolidated_16bit_state_dict = _consolidated_16bit_state_dict

    # ---- the module ----

    def compile(
        self,
        backend: str | Callable[..., Any] = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: None = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile the module's forward, as `torch.compile` does.

        Args:
            backend: As for `torch.compile`.
            compile_kwargs: Other options of `torch.compile`.
            schedule: Has no effect: there is no DeepCompile.
            compiled_autograd_enabled: Has no effect, likewise.
        """
        self.module.compile(**{**(compile_kwargs or {}), "backend": backend})

    # ---- the optimizer ----
    # With `step()`, the first three make the engine an optimizer for Lightning's Fabric.

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The param groups of the optimizer."""
        return self._need_optimizer("param_groups").param_groups

    @property
    def defaults(self) -> dict[str, Any]:
        """The default options of the optimizer."""
        return self._need_optimizer("defaults").defaults

    @property
    def state(self) -> Mapping[Any, Any]:
        """The optimizer's state, which is that of shards."""
        return self._need_optimizer("state").state

    def _need_optimizer(self, name: str) -> torch.optim.Optimizer:
        if self.optimizer is None:
            raise AttributeError(f"engine.{name}: there is no optimizer")
        return self.optimizer

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every param group; a schedule changes it in its next step."""
        for group in self.optimizer.param_groups if self.optimizer is not None else []:
            if isinstance(group["lr"], Tensor):  # a compiled step reads it where it is
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def get_mom(self) -> list[object]:
        """The momentum, or the betas, of each param group."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        return [group.get("betas", group.get("momentum")) for group in groups]

    # ---- the config ----

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage: 0, 1, 2 or 3."""
        return self._core.stage.number

    def zero_optimization(self) -> bool:
        """Whether any state is sharded: stages 1 to 3."""
        return self._core.stage.shards_optimizer

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether gradients are sharded: stages 2 and 3."""
        return self._core.stage.shards_gradients

    def zero_optimization_partition_weights(self) -> bool:
        """Whether weights are sharded: stage 3."""
        return self._core.stage.shards_parameters

    def fp16_enabled(self) -> bool:
        """Whether the model computes in float16."""
        return self._config.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        """Whether the model computes in bfloat16."""
        return self._config.bf16.enabled

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale follows the overflows."""
        rules = self._config.loss_scaling
        # DeepSpeed's fixed scale of 0 stands for a dynamic one.
        return rules.enabled and not rules.loss_scale

    def gradient_clipping(self) -> float:
        """The largest global gradient norm; 0 is no limit."""
        return self._config.gradient_clipping

    def wall_clock_breakdown(self) -> bool:
        """Whether the parts of a step are timed."""
        return self._config.wall_clock_breakdown

    def optimizer_name(self) -> str | None:
        """The optimizer's name in the config, if it is there."""
        return self._config.optimizer.type.lower() if self._config.optimizer else None

    def scheduler_name(self) -> str | None:
        """The schedule's name in the config, if it is there."""
        return self._config.scheduler.type if self._config.scheduler else None

    def log_level(self) -> str | None:
        """The level of DeepSpeed's logger in the config; None: not there."""
        return self._config.log_level

    def steps_per_print(self) -> int | None:
        """The number of steps between log lines; None: no lines."""
        return self._config.steps_per_print
