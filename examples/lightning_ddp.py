"""Stock Lightning under zero-agent: the Trainer saves and leaves when the world changes.

    zero-agent --nnodes=1:4 --max-restarts=3 examples/lightning_ddp.py

The script resumes from `last.ckpt` when it is started again. It needs `pip install lightning`.
"""

import os
import sys
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import zero_agent

EPOCHS = 4


class Model(lightning.LightningModule):
    """A linear regression model."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        return F.mse_loss(self.layer(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Leaves(Callback):
    """Saves and leaves after the same step on all ranks."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        zero_agent.heartbeat(trainer.global_step)
        if trainer.strategy.reduce_boolean_decision(zero_agent.should_leave(), all=False):
            trainer.save_checkpoint(os.path.join(trainer.default_root_dir, "last.ckpt"))
            zero_agent.leave()


if __name__ == "__main__":
    root = sys.argv[1] if len(sys.argv) > 1 else "lightning_ddp"
    lightning.seed_everything(0)
    inputs = torch.randn(512, 8)
    data = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=16)
    trainer = lightning.Trainer(
        default_root_dir=root, max_epochs=EPOCHS, strategy="ddp", accelerator="cpu", logger=False,
        devices=int(os.environ["LOCAL_WORLD_SIZE"]), num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        callbacks=[Leaves(), ModelCheckpoint(root, save_last=True)], enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(Model(), data, ckpt_path="last")
    print(f"step {trainer.global_step}", flush=True)
