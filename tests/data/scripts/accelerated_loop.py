"""A loop of accelerate's that saves its state once, and goes on from it if it is told to."""

import argparse
import os
import time

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import InitProcessGroupKwargs
from torch.utils.data import DataLoader, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir")
    parser.add_argument("--load", action="store_true")
    args = parser.parse_args()
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(zero_stage=1, gradient_accumulation_steps=2),
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
    )
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(torch.ones(64, 4)), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    state = os.path.join(args.output_dir, "state")
    if args.load and os.path.isdir(state):
        accelerator.load_state(state)
    for (rows,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(rows).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        if model.global_steps == 2 and not os.path.isdir(os.path.join(args.output_dir, "saved")):
            accelerator.save_state(state)
            os.makedirs(os.path.join(args.output_dir, "saved"), exist_ok=True)
            while True:  # until a node is lost
                time.sleep(0.02)
    accelerator.end_training()


if __name__ == "__main__":
    main()
