"""The Trainer of transformers, unchanged, with this engine under the name `deepspeed`.

    zero-agent --nnodes=1:4 --max-restarts=3 -m zero_deepspeed.as_deepspeed examples/trainer_hf.py

When it is started again after a kill, the run resumes from the newest checkpoint of the output
directory, at any world size. It needs `pip install transformers accelerate`.
"""

import sys

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

DEEPSPEED = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_optimization": {"stage": 2},
}


class Counting(Dataset[dict[str, Tensor]]):
    """Rows of numbers that count up in steps of one, two or three."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = (index * 7 + torch.arange(16) * (1 + index % 3)) % 61
        return {"input_ids": row, "labels": row}


def main() -> None:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=8,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    model = LlamaForCausalLM(config)
    arguments = TrainingArguments(
        output_dir=sys.argv[1] if len(sys.argv) > 1 else "trainer_hf",
        deepspeed=DEEPSPEED,
        num_train_epochs=2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=3,
        save_steps=4,
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Counting())
    trainer.train()
    trainer.save_model(f"{arguments.output_dir}/final")


if __name__ == "__main__":
    main()
