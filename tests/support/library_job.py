"""One training by each library: python library_job.py LIBRARY[-fsdp2] DATA DIRECTORY.

All of them train the same model on the same data, so all have one hash. `DIRECTORY/pause` has the
seconds that each step takes more; `DIRECTORY/kill` the step after which the last rank kills itself.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import zero_torch
from tests.support.run_report import report

SAMPLES, MICROBATCHES, MICRO_BATCH, EPOCHS = 110, 5, 2, 2
"""11 steps of 10 samples in each epoch."""
LIBRARIES = ("torch", "transformers", "accelerate", "lightning")
EVERY = 4
"""Steps between saves."""


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Divides itself among workers, and has lanes of unequal length."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        info = torch.utils.data.get_worker_info()
        for number in range(SAMPLES):
            if info is None or number % 7 % info.num_workers == info.id:
                yield rows()[number]


class Net(nn.Module):
    """Returns the mean loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))

    def forward(self, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.mse_loss(self.layers(inputs), targets)}


def rows() -> TensorDataset:
    inputs = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def loader_of(data: Dataset[Any]) -> DataLoader[Any]:
    shuffle = None if isinstance(data, IterableDataset) else True
    return DataLoader(data, batch_size=MICRO_BATCH, shuffle=shuffle)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)


def after_step(directory: Path, step: int) -> None:
    """What happens to a worker behind a step."""
    time.sleep(float((directory / "pause").read_text()))
    kill, last = directory / "kill", int(os.environ["WORLD_SIZE"]) - 1
    first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if first_life and int(os.environ["RANK"]) == last and kill.exists():
        os.kill(os.getpid(), signal.SIGKILL * (step == int(kill.read_text())))


def shard_on_cpus() -> None:
    """Let accelerate shard on CPUs, where it takes DDP whatever it is given."""
    from accelerate.state import AcceleratorState, DistributedType, PartialState

    constructor: Any = AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **named: Any) -> None:
        constructor(self, *args, fsdp_plugin=fsdp_plugin, **named)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = init


def by_torch(
    data: Dataset[Any], directory: Path, config: dict[str, Any], sharded: bool
) -> zero_torch.Run:
    dist.init_process_group("gloo")
    model: nn.Module = Net()
    if dist.get_world_size() > 1:
        model = nn.parallel.DistributedDataParallel(model)
    run = zero_torch.protect(
        model, optimizer_of(model), loader_of(data), microbatches=MICROBATCHES, config=config
    )
    run.load(directory / "run")
    for _ in range(run.loader.epoch, EPOCHS):
        for batch in run.loader:
            run.backward(model(*batch)["loss"])
            if run.step(max_norm=1.0):
                after_step(directory, run.global_step)
            run.save_if_due(directory / "run")
    return run


def by_accelerate(
    data: Dataset[Any], directory: Path, config: dict[str, Any], sharded: bool
) -> zero_torch.Run:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    from zero_libraries.accelerate import protect

    plugin = None
    if sharded:
        shard_on_cpus()
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=True)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    net = Net()
    run, model, optimizer, loader, _ = protect(
        accelerator,
        net,
        optimizer_of(net),
        loader_of(data),
        microbatches=MICROBATCHES,
        config=config,
    )
    run.load(directory / "run")
    for _ in range(run.loader.epoch, EPOCHS):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(*batch)["loss"])
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                after_step(directory, run.global_step)
            run.save_if_due(directory / "run")
    return run


def by_transformers(
    data: Dataset[Any], directory: Path, config: dict[str, Any], sharded: bool
) -> zero_torch.Run:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from zero_libraries.transformers import protect

    class After(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            after_step(directory, state.global_step)

    def collate(samples: list[Any]) -> dict[str, Tensor]:
        return dict(
            zip(("inputs", "targets"), map(torch.stack, zip(*samples, strict=True)), strict=True)
        )

    stream = isinstance(data, IterableDataset)
    if sharded:
        shard_on_cpus()
    arguments = TrainingArguments(
        output_dir=str(directory),
        per_device_train_batch_size=MICRO_BATCH,
        max_steps=STREAMED_STEPS if stream else -1,
        num_train_epochs=EPOCHS,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        remove_unused_columns=False,
        fsdp="full_shard" if sharded else "",
        fsdp_config={"fsdp_version": 2} if sharded else None,
    )
    trainer = Trainer(
        Net(), arguments, data_collator=collate, train_dataset=data, callbacks=[After()]
    )
    protect(trainer, microbatches=MICROBATCHES, config=config)
    trainer.train()
    run: zero_torch.Run = trainer.run
    steps = [entry["step"] for entry in trainer.state.log_history if "loss" in entry]
    assert steps == list(range(1, run.global_step + 1))
    return run


def by_lightning(
    data: Dataset[Any], directory: Path, config: dict[str, Any], sharded: bool
) -> zero_torch.Run:
    import lightning

    from zero_libraries.lightning import ZeroDDP, ZeroFSDP2

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = Net().layers

        def configure_model(self) -> None:
            if sharded:
                mesh: Any = self.device_mesh
                fully_shard(self.layers, mesh=mesh["data_parallel"])

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            return nn.functional.mse_loss(self.layers(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self)

        def on_train_batch_end(self, *_: Any) -> None:
            after_step(directory, self.global_step)

    zero: dict[str, Any] = {"microbatches": MICROBATCHES, "config": config}
    strategy: Any = ZeroDDP(directory / "run", **zero)
    if sharded:
        strategy = ZeroFSDP2(directory / "run", int(os.environ["WORLD_SIZE"]), 1, **zero)
    trainer = lightning.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        max_epochs=EPOCHS,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
    )
    trainer.fit(Module(), loader_of(data))
    assert (trainer.global_step, trainer.current_epoch) == (strategy.run.global_step, EPOCHS)
    return strategy.run


STREAMED_STEPS = 32
"""Of two epochs: the longest lane has 32 samples."""


def main() -> None:
    (library, _, how), kind, directory = sys.argv[1].partition("-"), sys.argv[2], Path(sys.argv[3])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = {
        "elastic": {"seed": 7, "sample_ledger": str(directory / "ledger")},
        "checkpoint": {"every_steps": EVERY},
    }
    data: Dataset[Any] = Stream() if kind == "stream" else rows()
    run = globals()[f"by_{library}"](data, directory, config, how == "fsdp2")
    report(run)
    run.close()


if __name__ == "__main__":
    main()
