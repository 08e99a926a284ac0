"""A language model fine-tuned by transformers' Trainer; DeepSpeed is only in its arguments.

Two epochs of made-up text, whose last step is a short one; a checkpoint every three steps.
"""

import argparse
import json
import os

import torch
from accelerate import PartialState
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Counting(Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        row = (index * 7 + torch.arange(16) * (1 + index % 3)) % 61
        return {"input_ids": row, "labels": row}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed")
    parser.add_argument("--output_dir")
    parser.add_argument("--resume_from_checkpoint")
    args = parser.parse_args()
    if not torch.cuda.is_available():  # on CPUs, accelerate has to be told how ranks meet
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        PartialState(backend="gloo")
    training_args = TrainingArguments(
        output_dir=args.output_dir,
        deepspeed=args.deepspeed,
        accelerator_config={"use_configured_state": not torch.cuda.is_available()},
        per_device_train_batch_size=2,
        gradient_accumulation_steps=3,
        num_train_epochs=2,
        learning_rate=3e-3,
        warmup_steps=2,
        weight_decay=0.1,
        logging_steps=1,
        save_steps=3,
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
        train_dataset=Counting(28),
        eval_dataset=Counting(8),
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    eval_loss = trainer.evaluate()["eval_loss"]
    trainer.save_model(os.path.join(args.output_dir, "final"))
    if training_args.process_index == 0:
        LlamaForCausalLM.from_pretrained(os.path.join(args.output_dir, "final"))
        logs = trainer.state.log_history
        keys = ("loss", "grad_norm", "learning_rate")
        steps = {log["step"]: [log[key] for key in keys] for log in logs if "loss" in log}
        engine = type(trainer.deepspeed).__name__
        print(json.dumps({"engine": engine, "steps": steps, "eval_loss": eval_loss}))


if __name__ == "__main__":
    main()
