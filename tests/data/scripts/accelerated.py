"""A training loop with accelerate: one epoch, a saved state, and the second epoch twice from it."""

import argparse
import json
import os

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import DummyOptim, DummyScheduler, InitProcessGroupKwargs, set_seed
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.integrations.deepspeed import unset_hf_deepspeed_config


def train(accelerator, model, optimizer, scheduler, loader):
    model.train()
    total = 0.0
    for (ids,) in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        total += loss.detach().float()
    mean = accelerator.reduce(total) / (len(loader) * accelerator.num_processes)
    return round(mean.item(), 6), scheduler.get_last_lr(), model.get_global_grad_norm()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--config")
    parser.add_argument("--output_dir")
    args = parser.parse_args()
    on_cpus = [] if torch.cuda.is_available() else [InitProcessGroupKwargs(backend="gloo")]
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=args.config),
        gradient_accumulation_steps=2,
        mixed_precision="bf16",
        kwargs_handlers=on_cpus,
    )
    set_seed(3)
    rows = torch.arange(20)[:, None]
    ids = (rows * 7 + torch.arange(16)[None] * (1 + rows % 3)) % 61
    loader = DataLoader(TensorDataset(ids), batch_size=2)
    shape = GPT2Config(
        vocab_size=61,
        n_positions=16,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLM",
    )
    model = GPT2LMHeadModel(shape)
    optimizer = DummyOptim(model.parameters(), lr=3e-3)
    scheduler = DummyScheduler(optimizer, total_num_steps=20, warmup_num_steps=2)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    train(accelerator, model, optimizer, scheduler, loader)
    accelerator.save_state(os.path.join(args.output_dir, "state"))
    first = train(accelerator, model, optimizer, scheduler, loader)
    accelerator.load_state(os.path.join(args.output_dir, "state"))
    again = train(accelerator, model, optimizer, scheduler, loader)

    weights = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).save_pretrained(
        os.path.join(args.output_dir, "final"),
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=weights and dict(weights),
    )
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        unset_hf_deepspeed_config()  # else it would be divided, which all ranks take part in
        back = GPT2LMHeadModel.from_pretrained(os.path.join(args.output_dir, "final"))
        same = all(torch.equal(weights[name], value) for name, value in back.state_dict().items())
        print(json.dumps({"first": first, "again": again, "same": same}))
    accelerator.end_training()


if __name__ == "__main__":
    main()
