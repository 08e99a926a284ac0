"""The smallest script on the engine. It can be killed at any step and resume at any world size.

    python examples/minimal.py
    zero-agent --nnodes=1:4 --max-restarts=3 examples/minimal.py checkpoints

When it is started again, the script resumes from the last checkpoint. Its final weights are the
same in every case.
"""

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import zero_engine

CONFIG = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 2},
    "checkpoint": {"keep_last": 2},
}
EPOCHS = 3


def main() -> None:
    directory = sys.argv[1] if len(sys.argv) > 1 else "checkpoints"
    torch.manual_seed(0)  # every rank builds the same model and the same data
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    inputs = torch.randn(512, 8)
    dataset = TensorDataset(inputs, inputs.prod(1, keepdim=True))

    engine = zero_engine.initialize(model, training_data=dataset, config=CONFIG)
    loader: Any = engine.training_dataloader
    engine.load_checkpoint(directory)  # the newest complete one, if there is one
    for _ in range(loader.epoch, EPOCHS):
        for batch, targets in loader:  # begins after the last committed step
            loss = F.mse_loss(engine(batch), targets)
            engine.backward(loss)
            engine.step()
            if engine.checkpoint_due(every_steps=10):
                engine.save_checkpoint(directory)
    engine.save_checkpoint(directory)
    weights = engine.weight_hash()  # all ranks compute it together
    if engine.global_rank == 0:
        print(f"step {engine.global_steps}, weights {weights}", flush=True)
    engine.destroy()


if __name__ == "__main__":
    main()
