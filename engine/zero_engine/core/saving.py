"""Saving, loading and exporting: the engine's part of it.

Must always hold: every rank calls these, between steps; what is exported is whole at every stage.
`persistence` does the work. A base of `engine.Engine`, which sets the attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.persistence import ClientSource, Persistence
from zero_checkpoint.place import place
from zero_checkpoint.tags import agree_on_tag
from zero_checkpoint.tools.export import read_state_dict, select
from zero_checkpoint.tools.locate import one
from zero_comm.agent_link import AgentLink, peers_may_vanish
from zero_contract.errors import ZeroError
from zero_engine.config import Config
from zero_engine.core.export import without_frozen, write_weights
from zero_engine.core.micro_steps import MicroSteps
from zero_engine.core.wrapper import Wrapper
from zero_engine.offload_states import WEIGHTS
from zero_engine.parameters.gather import GatheredParameters
from zero_engine.parts import Core
from zero_engine.sharding.weights import module_state_dict
from zero_engine.state.selection import LoadOptions
from zero_engine.state.training import EngineTraining


class Checkpointing(Wrapper):
    """The part of an engine that writes and reads its state."""

    device: torch.device
    global_rank: int
    _config: Config
    _core: Core
    _link: AgentLink
    _micro_steps: MicroSteps
    _persistence: Persistence
    _training: EngineTraining

    # ---- checkpoints ----

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        client_sd: Mapping[str, Any] | None = None,
        blocking: bool | None = None,
    ) -> bool:
        """Save at this step's boundary; every rank calls it.

        In the background, training goes on as soon as the state is copied. A failure is then
        reported by the next `step()`, and the checkpoints there are stay as they are.

        Args:
            save_dir: On storage that all ranks share, or a URL: s3://bucket/dir, gs://bucket/dir.
            tag: A name; by default global_step<N>.
            client_state: The script's own state, given back by `load_checkpoint`: numbers, text,
                tensors and numpy arrays of up to 1 MiB each, tuples, lists and dictionaries of
                them. What rank 0 gives.
            save_latest: Accepted for DeepSpeed: the file `latest` is a hint that nothing needs.
            exclude_frozen_parameters: Leave out what is not trained: whoever loads the
                checkpoint keeps the weights that the script has given these parameters.
            client_sd: The name that DeepSpeed's tutorials use for the client state.
            blocking: Return when it is published; None: as the config's checkpoint.async says.
                A worker that leaves always waits.

        Returns:
            Whether it was published, or in the background: begun. False if this worker's round
            is over or its agent does not answer, if the disk is full and the script asks
            `checkpoint_due` (which is then true again after a minute; other scripts wait here for
            room, up to an hour), or if the save before is in flight and checkpoint.when_busy is
            "skip": nothing was written, and the log says so.

        Raises:
            CheckpointError: A rank failed, the client state has something else in it, or the ranks
                name it differently and checkpoint.tag_validation is "Fail"; nothing was saved. Or
                this is the second save in a row that was not published, though etcd is there.
        """
        del save_latest
        self._core.moved.need("save_checkpoint()")
        if self._micro_steps.awaits_step:
            raise ZeroError("save_checkpoint() between backward() and step(); call step() first")
        with peers_may_vanish(self._link):
            mode = self._config.checkpoint.tag_validation.lower()
            agree_on_tag(tag, mode, self._core.collectives)
            return self._persistence.save(
                place(save_dir),
                tag,
                client_state or client_sd or {},
                blocking=blocking,
                exclude_frozen=exclude_frozen_parameters,
            )

    def keep_client_state(self, source: ClientSource | None) -> None:
        """Say where the engine finds the script's own state, for checkpoints that it makes itself.

        Those are the ones in memory (`checkpoint.ram`), and the one with which a worker leaves.
        A script that gives `client_state` to `save_checkpoint` and does not call this gets none in
        memory, and leaves only after its own next save. Call it before `load_checkpoint`.

        Args:
            source: Called at the end of a step, on every rank, for a `client_state`, also by
                `save_checkpoint` without one. None: there is none.
        """
        self._persistence.client_source = source

    def wait_for_checkpoint(self) -> bool:
        """Wait for the save in flight, if any.

        Returns:
            Whether the last save was published.

        Raises:
            CheckpointError: It has failed, and no `step()` has said so yet.
        """
        with peers_may_vanish(self._link):
            return self._persistence.wait()

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., object] | None = None,
    ) -> tuple[str | None, dict[str, Any]]:
        """Load the newest valid checkpoint, made at any world size and stage.

        An engine without an optimizer loads the weights alone, in its own dtype.

        Args:
            load_dir: As given to `save_checkpoint`.
            tag: Only a checkpoint of this name, or what the file `latest` says.
            load_module_strict: False: parameters and buffers that are only here or only there
                are no error.
            load_optimizer_states: False: the optimizer stays as it is.
            load_lr_scheduler_states: False: the scheduler stays as it is.
            load_module_only: Neither optimizer, nor scheduler, nor the position in the data.
            custom_load_fn: Called with `src`, the checkpoint's fp32 state_dict, and `dst`, the
                module with all its parameters there: what it makes of them on rank 0 is loaded.

        Returns:
            Its path and the client state, or (None, {}) if there is none yet.

        Raises:
            DamagedCheckpoint: There are checkpoints, and none is whole.
            ModelMismatch: It is another model's; unless a damaged one was tried before it,
                everything is as it was.
            CheckpointError: A rank could not read. After this and after damage the state may be
                half loaded, and nothing but another load is allowed.
        """
        self._core.moved.need("load_checkpoint()", refills=True)
        with peers_may_vanish(self._link):
            options = LoadOptions(
                strict=load_module_strict and custom_load_fn is None,
                optimizer=load_optimizer_states,
                scheduler=load_lr_scheduler_states,
                module_only=load_module_only,
            )
            path, client = self._persistence.load(
                place(load_dir), tag, self._training.loading(options)
            )
        if path is not None and custom_load_fn is not None:
            checkpoint = one(str(path))
            source = read_state_dict(checkpoint, select(checkpoint, dtype=torch.float32))
            with GatheredParameters(self.module, modifier_rank=0):
                custom_load_fn(src=source, dst=self.module)
        return path, client

    def checkpoint_due(
        self, every_steps: int | None = None, every_s: float | Literal["auto"] | None = None
    ) -> bool:
        """Whether to save now; the same on all ranks. Also true when this worker is to leave.

        A script that saves when told so leaves at that very boundary.

        Args:
            every_steps: Every so many steps,
            every_s: or every so many seconds, or as often as "auto" finds right from what saving
                costs and how often the job fails. Without either, as the config says.
        """
        return self._persistence.due(every_steps, every_s)

    @property
    def asked_to_leave(self) -> bool:
        """Whether this worker is to leave; all ranks know it since the same `step()`."""
        return self._persistence.leaving

    def leave_group(self) -> None:
        """End the process with the checkpoint just saved, as the agent has asked.

        For a loop that has to write more beside a checkpoint; `step()` does it otherwise. Every
        rank calls it.

        Raises:
            SystemExit: Always.
            ZeroError: Nobody has asked this worker to leave.
        """
        if not self._persistence.leaving:
            raise ZeroError("leave_group() without asked_to_leave; go on training")
        with peers_may_vanish(self._link):
            self._persistence.leave()

    # ---- the weights ----

    def weight_hash(self) -> str:
        """SHA-256 of the weights: the same at every world size and stage. Every rank calls it."""
        self._core.moved.need("weight_hash()", WEIGHTS)
        with peers_may_vanish(self._link):
            return self._training.weight_hash()

    def module_state_dict(self) -> dict[str, Tensor]:
        """The module's whole state_dict on the CPU, at any stage. Every rank calls it."""
        self._core.moved.need("module_state_dict()", WEIGHTS)
        with peers_may_vanish(self._link):
            core = self._core
            return module_state_dict(core.module, core.units, core.aliases)

    def get_fp32_state_dict(self) -> dict[str, Tensor]:
        """The module's whole state_dict in the highest precision, frozen parameters included."""
        self._core.moved.need("get_fp32_state_dict()", WEIGHTS)
        with peers_may_vanish(self._link):
            core = self._core
            return module_state_dict(core.module, core.units, core.aliases, highest=True)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Give the module other weights, at any stage. Every rank calls it.

        Args:
            state_dict: With the names of `state_dict()`, which begin with `module.`. Rank 0's
                parameters become everybody's, each rank loads its own buffers.
            strict: As for torch.
            assign: Without effect: weights are always copied to where the engine steps them.

        Returns:
            The missing and the unexpected keys.
        """
        del assign
        self._core.moved.need("load_state_dict()", WEIGHTS)
        with GatheredParameters(self.module, modifier_rank=0):
            return super().load_state_dict(state_dict, strict)

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the state_dict, in the dtype of the model; every rank calls it.

        Args:
            save_dir: Made if it is not there.
            save_filename: With the suffix .safetensors in that format, else as torch.save.
            exclude_frozen_parameters: Leave out what is not trained.

        Returns:
            True: the file is there, at every stage.

        Raises:
            CheckpointError: It could not be written.
        """
        whole = self._consolidated_16bit_state_dict(exclude_frozen_parameters)
        path, problem = Path(save_dir) / save_filename, ""
        if self.global_rank == 0:
            problem = write_weights(whole, path)
        failed = torch.tensor([float(bool(problem))], device=self.device)
        with peers_may_vanish(self._link):
            self._core.collectives.broadcast(failed, f"whether {path} was written")
        if failed.item():
            raise CheckpointError(problem or f"{path} was not written: rank 0 says why")
        return True

    save_fp16_model = save_16bit_model

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Whether `save_16bit_model` writes the whole model at stage 3: always."""
        return True

    def _consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, Tensor]:
        """What `save_16bit_model` writes, for libraries that write it by themselves.

        Every rank calls it, and every rank gets it: DeepSpeed's others get None, and what a
        library then asks of their module is a state_dict of shards.
        """
        whole = self.module_state_dict()
        return without_frozen(whole, self.module) if exclude_frozen_parameters else whole

    _zero3_consolidated_16bit_state_dict = _consolidated_16bit_state_dict
