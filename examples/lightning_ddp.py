"""Lightning, DDP or FSDP2: the same bits at every world size and after every kill.

zero-agent --nnodes=1:4 --max-restarts=3 examples/lightning_ddp.py DIRECTORY [ddp | fsdp2]
"""

import os
import sys
from typing import Any, cast

import lightning
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from zero_libraries.lightning import ZeroDDP, ZeroFSDP2

EPOCHS, SAVE_EVERY = 20, 25


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def configure_model(self) -> None:
        if "fsdp2" in sys.argv:
            fully_shard(self.layers, mesh=cast(Any, self.device_mesh)["data_parallel"])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        return nn.functional.mse_loss(self.layers(batch[0]), batch[1])


lightning.seed_everything(0)
inputs = torch.randn(160, 8)
loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), 4, shuffle=True)
zero: dict[str, Any] = {"microbatches": 8, "config": {"checkpoint": {"every_steps": SAVE_EVERY}}}
if "fsdp2" in sys.argv:
    strategy: Any = ZeroFSDP2(sys.argv[1], int(os.environ["WORLD_SIZE"]), 1, **zero)
else:
    strategy = ZeroDDP(sys.argv[1], **zero)
trainer = lightning.Trainer(
    strategy=strategy, max_epochs=EPOCHS, gradient_clip_val=1.0,
    devices=int(os.environ["LOCAL_WORLD_SIZE"]), num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
    accelerator="cpu", logger=False, enable_checkpointing=False,
)  # fmt: skip
trainer.fit(Model(), loader)
print(f"step {strategy.run.global_step}, weights {strategy.run.weight_hash()}", flush=True)
