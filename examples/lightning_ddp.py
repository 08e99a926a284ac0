"""Lightning with zero_torch, DDP or FSDP2: the same bits at every world size and after every kill.

zero-agent --nnodes=1:4 --max-restarts=3 examples/lightning_ddp.py DIRECTORY [ddp | fsdp2]
"""

import os
import sys
from typing import Any, cast

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import zero_torch

EPOCHS, SAVE_EVERY = 20, 25


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def configure_model(self) -> None:
        if "fsdp2" in sys.argv:
            fully_shard(self.layers, mesh=cast(Any, self.device_mesh)["data_parallel"])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def on_fit_start(self) -> None:
        inputs, its = torch.randn(160, 8), cast(Any, self.trainer.strategy)
        loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), 4, shuffle=True)
        self.run = zero_torch.protect(its.model, its.optimizers[0], loader, microbatches=8)
        self.run.load(sys.argv[1])
        self.trainer.fit_loop.max_epochs = EPOCHS - self.run.loader.epoch

    def train_dataloader(self) -> Any:
        return self.run.loader  # `reload_dataloaders_every_n_epochs`: its length is the rest of one

    def training_step(self, batch: list[Tensor], _: int) -> None:
        self.manual_backward(nn.functional.mse_loss(self.layers(batch[0]), batch[1]))
        self.run.step(max_norm=1.0)
        self.run.save_if_due(sys.argv[1], every_steps=SAVE_EVERY)


lightning.seed_everything(0)
sharded = ModelParallelStrategy(int(os.environ["WORLD_SIZE"]), 1)
trainer = lightning.Trainer(
    strategy=sharded if "fsdp2" in sys.argv else "ddp", reload_dataloaders_every_n_epochs=1,
    devices=int(os.environ["LOCAL_WORLD_SIZE"]), num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
    accelerator="cpu", logger=False, enable_checkpointing=False, use_distributed_sampler=False,
)  # fmt: skip
trainer.fit(model := Model())
print(f"step {model.run.global_step}, weights {model.run.weight_hash()}", flush=True)
model.run.close()
