"""A training of torchtitan under a plug-in: python torchtitan_job.py DIRECTORY; see `library_job`.

The debug model of llama3 on a CPU. `DIRECTORY/seed` has the weights to begin with, if it exists.
"""

import json
import os
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import tests.support.torchtitan_cpu  # noqa: F401 - the CPU comes first

# isort: split
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.config import ConfigManager
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.models.llama3 import config_registry
from torchtitan.tools.logging import init_logger
from torchtitan.trainer import Trainer

from tests.support.library_job import after_step
from tests.support.run_report import report
from zero_libraries.torchtitan import protect

STEPS, MICROBATCHES, MICRO_BATCH, LENGTH, DOCUMENTS = 10, 5, 2, 32, 300
WORDS = [f"w{number}" for number in range(60)]
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]


def documents(_: str) -> Dataset:
    return Dataset.from_list(
        [
            {"text": " ".join(WORDS[(n * 7 + at * (1 + n % 3)) % 60] for at in range(20 + n % 30))}
            for n in range(DOCUMENTS)
        ]
    )


DATASETS["words"] = DatasetConfig(path="", loader=documents, sample_processor=lambda it: it["text"])


def tokenizer_in(directory: Path) -> str:
    directory.mkdir(exist_ok=True)
    known = {word: at for at, word in enumerate([*SPECIAL, *WORDS])}
    made = Tokenizer(models.WordLevel(known, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(SPECIAL)
    made.save(str(directory / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(named))
    return str(directory)


class Paced(Trainer):
    """Is killed, and waits, behind its steps."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    def should_continue_training(self) -> bool:
        after_step(Path(self.config.dump_folder), self.step)
        return super().should_continue_training()


def small(directory: Path) -> Trainer.Config:
    """The debug model, smaller."""
    config = config_registry.llama3_debugmodel()
    del config.model_spec.model.layers[2:]
    config.hf_assets_path = tokenizer_in(directory / f"tokenizer-{os.environ['RANK']}")
    config.dump_folder = str(directory)
    training = config.training
    training.local_batch_size, training.global_batch_size = MICRO_BATCH, MICRO_BATCH * MICROBATCHES
    training.seq_len = LENGTH
    config.dataloader.dataset = "words"
    config.debug.seed = 7
    config.parallelism.spmd_backend = "partial_dtensor"  # the other one needs a torch after 2.13
    config.validator.enable = False
    return config


def training() -> Trainer.Config:
    """The same, paced and saved."""
    directory = Path(sys.argv[1])
    config = small(directory)
    config.checkpoint = CheckpointManager.Config(
        enable=True, interval=2, last_save_model_only=False
    )
    if (directory / "seed").exists():
        config.checkpoint.initial_load_path = str(directory / "seed" / "step-0")
    return Paced.Config(**{each.name: getattr(config, each.name) for each in fields(config)})


def protected() -> Trainer.Config:
    elastic = {"sample_ledger": str(Path(sys.argv[1]) / "ledger")}
    return protect(training(), config={"elastic": elastic})


def main() -> None:
    """As `torchtitan.train`, which would import the Trainer before what makes it run on a CPU."""
    init_logger()
    if sys.argv[2:] == ["seed"]:
        config = training()
        config.checkpoint.create_seed_checkpoint = True
        config.checkpoint.folder = "seed"
        config.build().checkpointer.save(curr_step=0, last_step=True)
        return
    flags = ["--module=tests.support.torchtitan_job", "--config=protected"]
    trainer: Any = ConfigManager().parse_args([*flags, f"--training.steps={STEPS}"]).build()
    trainer.train()
    report(trainer.run)
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
