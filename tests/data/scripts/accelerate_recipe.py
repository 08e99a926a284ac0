"""A loop of accelerate with the engine: one hash at all numbers of ranks that divide MICROBATCHES.

Each line that is needed for that says `# exact:`.
"""

import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration, DeepSpeedPlugin
from accelerate.utils import InitProcessGroupKwargs
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, SAVE_EVERY, MICROBATCHES = 5, 3, 6


def main() -> None:
    root, world = Path(sys.argv[1]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(zero_stage=1),
        gradient_accumulation_steps=MICROBATCHES // world,  # exact: the step keeps its samples
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),  # exact: their order
        kwargs_handlers=[] if torch.cuda.is_available() else [InitProcessGroupKwargs("gloo")],
    )
    model, inputs = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)), torch.randn(96, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 8))
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), 4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.register_for_checkpointing(scheduler)  # exact: not prepared, it steps once a step
    if (newest := root / "newest").exists():  # which is written when a state is whole
        accelerator.load_state(str(root / newest.read_text()))
    first, per_epoch = model.global_steps, len(inputs) // (4 * MICROBATCHES)
    for epoch in range(first // per_epoch, EPOCHS):
        loader.set_epoch(epoch)  # exact: a loader begins with the order of epoch 0
        done = (model.global_steps % per_epoch) * accelerator.gradient_accumulation_steps
        for batch, targets in accelerator.skip_first_batches(loader, done):
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(batch), targets))
                optimizer.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            scheduler.step()
            if model.asked_to_leave or model.global_steps % SAVE_EVERY == 0:
                state = f"state-{model.global_steps}"
                accelerator.save_state(str(root / state))
                accelerator.wait_for_everyone()
                if accelerator.is_main_process:
                    (root / "partial").write_text(state)
                    (root / "partial").replace(newest)
    accelerator.print(f"step {model.global_steps} from {first}, weights {model.weight_hash()}")


if __name__ == "__main__":
    main()
