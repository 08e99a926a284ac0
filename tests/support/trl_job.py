"""TRL's Trainers under a plug-in: python trl_job.py KIND[-stream] DIRECTORY; see `library_job`."""

import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from tests.support.library_job import after_step
from tests.support.run_report import report
from zero_libraries.transformers import protect

SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def words(number: int, count: int) -> str:
    return " ".join(f"w{(number * 7 + at * (1 + number % 3)) % 60}" for at in range(count))


def tokenizer() -> Any:
    known = [*SPECIAL.values(), *(f"w{number}" for number in range(60))]
    made = Tokenizer(models.WordLevel({word: at for at, word in enumerate(known)}, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, **SPECIAL)


def model() -> Any:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, num_attention_heads=2, max_position_embeddings=64, **shape, **tokens
        )
    )


def different_words(completions: list[str], **_: Any) -> list[float]:
    """A reward."""
    return [float(len(set(text.split()))) for text in completions]


MICROBATCHES, STREAMED_STEPS = 5, 6
"""Of two epochs: the longest of 5 lanes has 6 samples."""


def main() -> None:
    (kind, _, how), directory = sys.argv[1].partition("-"), Path(sys.argv[2])
    torch.set_num_threads(1)
    common: dict[str, Any] = {
        "output_dir": str(directory), "per_device_train_batch_size": 2, "num_train_epochs": 2,
        "max_steps": STREAMED_STEPS if how else -1, "learning_rate": 3e-3, "logging_steps": 1,
        "save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True,
        "bf16": False,
    }  # fmt: skip

    class After(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            after_step(directory, state.global_step)

    def data(rows: list[dict[str, str]]) -> Any:
        made = Dataset.from_list(rows)
        return made.to_iterable_dataset(num_shards=MICROBATCHES) if how else made

    with_rest: dict[str, Any] = {"processing_class": tokenizer(), "callbacks": [After()]}
    match kind:
        case "sft" | "packed":
            rows = [{"text": words(n, 4 + n % 9)} for n in range(78 if kind == "packed" else 26)]
            packing = {"packing": kind == "packed", "packing_strategy": "wrapped"}
            args: Any = SFTConfig(**common, max_length=24, **packing)
            trainer: Any = SFTTrainer(model(), args=args, train_dataset=data(rows), **with_rest)
        case "dpo":
            rows = [  # whose rewards are gathered: an odd number of them
                {"prompt": words(n, 4), "chosen": f" {words(n + 1, 3)}", "rejected": " w1 w2"}
                for n in range(27)
            ]
            args = DPOConfig(**common, max_length=24)
            trainer = DPOTrainer(model(), model(), args=args, train_dataset=data(rows), **with_rest)
        case _:
            rows = [{"prompt": words(n, 4)} for n in range(33)]
            sizes = {"num_generations": 2, "max_completion_length": 6, "loss_type": "grpo"}
            args = GRPOConfig(**{**common, "per_device_train_batch_size": 4}, **sizes)
            trainer = GRPOTrainer(
                model(), different_words, args=args, train_dataset=data(rows),
                **with_rest,
            )  # fmt: skip
    config = {
        "elastic": {"sample_ledger": str(directory / "ledger")},
        "checkpoint": {"every_steps": 2},
    }
    protect(trainer, microbatches=MICROBATCHES, config=config)
    trainer.train()
    report(trainer.run)


if __name__ == "__main__":
    main()
