"""A language model fine-tuned by transformers' Trainer; DeepSpeed is only in its arguments.

Two epochs of made-up text, whose last step is a short one; a checkpoint every three steps, and on
from the newest there is, unless it is told to take no care of that.
"""

import argparse
import json
import os
import signal
import time

import torch
from accelerate import PartialState
from torch.utils.data import Dataset, IterableDataset
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.trainer_utils import get_last_checkpoint


class Counting(Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        row = (index * 7 + torch.arange(16) * (1 + index % 3)) % 61
        return {"input_ids": row, "labels": row}


class Stream(IterableDataset):
    """The same samples in another order in each epoch, as a streamed dataset has them."""

    def __init__(self, size):
        self.samples = Counting(size)
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        size = len(self.samples)
        yield from (self.samples[(index + 5 * self.epoch) % size] for index in range(size))


class WaitsForPeers(TrainerCallback):
    """Stops short in a step until a file is there."""

    def __init__(self, step, path):
        self.step = step
        self.path = path

    def on_substep_end(self, args, state, control, **kwargs):
        if state.global_step + 1 == self.step:
            while not os.path.exists(self.path):
                time.sleep(0.02)


class PowerCut(TrainerCallback):
    """Kills rank 1 in its first life, after a step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if first_life and args.process_index == 1 and state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


class Stops(TrainerCallback):
    """Ends training after a step, as EarlyStoppingCallback does, with a checkpoint."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            control.should_save = control.should_training_stop = True


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed")
    parser.add_argument("--output_dir")
    parser.add_argument("--resume_from_checkpoint")
    parser.add_argument("--never_resume", action="store_true")
    parser.add_argument("--accumulation", type=int, default=3)
    parser.add_argument("--save_only_model", action="store_true")
    parser.add_argument("--kill_at_step", type=int)
    parser.add_argument("--wait_in_step", type=int)
    parser.add_argument("--stream", type=int)
    parser.add_argument("--max_steps", type=int, default=-1)
    parser.add_argument("--stop_at_step", type=int)
    parser.add_argument("--die_behind", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():  # on CPUs, accelerate has to be told how ranks meet
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        PartialState(backend="gloo")
    training_args = TrainingArguments(
        output_dir=args.output_dir,
        deepspeed=args.deepspeed,
        accelerator_config={"use_configured_state": not torch.cuda.is_available()},
        per_device_train_batch_size=2,
        gradient_accumulation_steps=args.accumulation,
        num_train_epochs=2,
        max_steps=6 if args.stream else args.max_steps,
        learning_rate=3e-3,
        warmup_steps=2,
        weight_decay=0.1,
        logging_steps=1,
        save_steps=3,
        save_only_model=args.save_only_model,
        report_to=[],
        disable_tqdm=True,
    )
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
    )
    trainer = Trainer(
        model=LlamaForCausalLM(shape),
        args=training_args,
        train_dataset=Stream(args.stream) if args.stream else Counting(28),
        eval_dataset=Counting(8),
        callbacks=[
            PowerCut(args.kill_at_step),
            Stops(args.stop_at_step),
            WaitsForPeers(args.wait_in_step, os.path.join(args.output_dir, "go")),
        ],
    )
    checkpoint = args.resume_from_checkpoint
    if checkpoint is None and not args.never_resume and os.path.isdir(args.output_dir):
        checkpoint = get_last_checkpoint(args.output_dir)
    trainer.train(resume_from_checkpoint=checkpoint)
    if args.die_behind and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os._exit(1)
    eval_loss = trainer.evaluate()["eval_loss"]
    trainer.save_model(os.path.join(args.output_dir, "final"))
    if training_args.process_index == 0:
        unset_hf_deepspeed_config()  # else it would be divided, which all ranks take part in
        LlamaForCausalLM.from_pretrained(os.path.join(args.output_dir, "final"))
        logs = trainer.state.log_history
        keys = ("loss", "grad_norm", "learning_rate")
        steps = {log["step"]: [log[key] for key in keys] for log in logs if "loss" in log}
        engine = type(trainer.deepspeed).__name__
        print(json.dumps({"engine": engine, "steps": steps, "eval_loss": eval_loss}))


if __name__ == "__main__":
    main()
