"""Ranks that load and save models of transformers at stage 3, and tell what that took.

What is read is anonymous memory: the files of the model are mapped, and the kernel may drop them.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # once: each rank would import it
import torch.distributed as dist
from torch import nn

import zero_deepspeed.as_deepspeed  # isort: split

from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
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


def experts() -> MixtralConfig:
    """A tiny mixture of experts, whose files have tensors of other shapes than the model."""
    return MixtralConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
    )


def engine_of(model: nn.Module, **more: Any) -> Any:
    """An engine at stage 3."""
    return zero_deepspeed.initialize(model=model, config=SETTINGS | more)[0]


def save(engine: Any, directory: Path) -> None:
    """Save a model as loops of accelerate do, on every rank."""
    first = dist.get_rank() == 0
    weights = engine._zero3_consolidated_16bit_state_dict()  # accelerator.get_state_dict(engine)
    engine.module.save_pretrained(directory, is_main_process=first, state_dict=weights)
    dist.barrier()


def measure_save(directory: Path) -> dict[str, Any]:
    """The peak while a model in 16 bits is saved, and whether the file has its weights."""
    engine = engine_of(LlamaForCausalLM._from_config(shape()), bf16={"enabled": True})
    save(engine_of(LlamaForCausalLM._from_config(shape(1))), directory / "first")  # libraries
    gc.collect()
    peak = AnonymousPeak()
    save(engine, directory / "saved")
    peak_bytes = peak.end()
    whole = engine.module_state_dict()
    saved = load_file(directory / "saved" / "model.safetensors")
    save(engine_of(MixtralForCausalLM._from_config(experts())), directory / "experts")
    names = load_file(directory / "experts" / "model.safetensors")
    return {
        "saved": peak_bytes,
        "whole": sum(value.nbytes for value in whole.values()),
        "same_saved": saved.keys() == whole.keys()
        and all(torch.equal(whole[name], value) for name, value in saved.items()),
        "experts": sum(".experts." in name for name in names),
    }


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
    engine = engine_of(model)
    made = peak.end()
    whole = engine.module_state_dict()
    saved = load_file(f"{directory}/model/model.safetensors")
    same = all(torch.equal(whole[name], value) for name, value in saved.items())
    missing = sorted(saved.keys() ^ whole.keys())
    drawn = engine_of(LlamaForCausalLM._from_config(shape(1))).module_state_dict()
    spread = round(drawn["model.layers.0.mlp.up_proj.weight"].std().item(), 3)
    del model, engine, whole, saved, drawn
    told = measure_save(Path(directory))
    del kept
    return {
        **{"loaded": loaded, "made": made, "divided": divided, "same": same},
        **{"missing": missing, "spread": spread},
        **told,
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
