"""Ranks that load a model of transformers under a config of stage 3, and tell what that took.

What is read is anonymous memory: the files of the model are mapped, and the kernel may drop them.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # once: each rank would import it
import torch.distributed as dist

import zero_deepspeed.as_deepspeed  # isort: split

from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations.deepspeed import HfDeepSpeedConfig

from tests.numerics.peak_initial import run_ranks
from tests.numerics.peak_memory import AnonymousPeak
from zero_engine.parameters import construction
from zero_engine.parameters.early_shards import share_of

WIDTH, INNER, LAYERS, VOCABULARY = 512, 1376, 6, 1024
UNIT = 4 * WIDTH * WIDTH + 3 * WIDTH * INNER + 2 * WIDTH
SETTINGS: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
}


def shape(layers: int = LAYERS) -> LlamaConfig:
    """About 20 M parameters."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=layers,
        num_attention_heads=8,
        tie_word_embeddings=False,
    )


def measure(given: dict[str, Any], rank: int, store: str) -> dict[str, Any]:
    """One rank: the peaks, and whether the weights are those of the files."""
    world = given["world"]
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    kept = HfDeepSpeedConfig(SETTINGS)
    construction.OPEN_ELEMENTS = UNIT
    directory = given["directory"]
    LlamaForCausalLM.from_pretrained(f"{directory}/small")  # libraries, threads
    peak = AnonymousPeak()
    model = LlamaForCausalLM.from_pretrained(f"{directory}/model")
    loaded = peak.end()
    divided = all(share_of(param) is not None for param in model.parameters())
    peak = AnonymousPeak()
    engine = zero_deepspeed.initialize(model=model, config=SETTINGS)[0]
    made = peak.end()
    whole = engine.module_state_dict()
    saved = load_file(f"{directory}/model/model.safetensors")
    same = all(torch.equal(whole[name], value) for name, value in saved.items())
    drawn = zero_deepspeed.initialize(
        model=LlamaForCausalLM._from_config(shape(1)), config=SETTINGS
    )[0].module_state_dict()
    spread = round(drawn["model.layers.0.mlp.up_proj.weight"].std().item(), 3)
    del kept
    return {
        **{"loaded": loaded, "made": made, "divided": divided, "same": same},
        **{"missing": sorted(saved.keys() ^ whole.keys()), "spread": spread},
    }


def main() -> None:
    """The number of ranks on standard input, what they tell on standard output."""
    given = json.load(sys.stdin)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        given["directory"] = directory
        torch.manual_seed(0)
        LlamaForCausalLM(shape()).save_pretrained(Path(directory, "model"))
        LlamaForCausalLM(shape(1)).save_pretrained(Path(directory, "small"))
        print(json.dumps(run_ranks(measure, given, os.path.join(directory, "store"))))


if __name__ == "__main__":
    main()
