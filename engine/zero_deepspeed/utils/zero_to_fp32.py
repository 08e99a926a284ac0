"""DeepSpeed's `deepspeed.utils.zero_to_fp32`: the fp32 weights of a checkpoint.

python -m zero_deepspeed.utils.zero_to_fp32 CHECKPOINTS OUT

`zero-ckpt export` does the same and more.
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.format.pieces import PARAM
from zero_checkpoint.loading.candidates import Candidate
from zero_checkpoint.tools.arguments import size
from zero_checkpoint.tools.conversion.export import (
    ExportSelection,
    export_hf,
    export_torch,
    read_state_dict,
    select,
)
from zero_checkpoint.tools.locate import one
from zero_comm.waiting import transport_failures
from zero_comm.worker.distributed import group_store, group_timeout_s
from zero_contract.errors import ZeroError
from zero_engine.core.rewrap import take_without_weights

__all__ = [
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
]

Module = TypeVar("Module", bound=nn.Module)


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Tensor]:
    """The whole state_dict on the CPU, floating-point tensors in fp32.

    Args:
        checkpoint_dir: The directory of `save_checkpoint`, or one checkpoint in it.
        tag: The name of a checkpoint; by default the newest.
        exclude_frozen_parameters: Leave out parameters that were not trained; buffers stay.
        lazy_mode: Without effect: a state_dict that is read later could not be verified.

    Raises:
        CheckpointError: There is no such checkpoint.
        DamagedCheckpoint: The checksum of a tensor is wrong.
    """
    del lazy_mode
    checkpoint, chosen = _chosen(checkpoint_dir, tag, exclude_frozen_parameters)
    return read_state_dict(checkpoint, chosen)


def load_state_dict_from_zero_checkpoint(
    model: Module, checkpoint_dir: str | Path, tag: str | None = None
) -> Module:
    """Load the weights of a checkpoint into a model, on the CPU; returns the model.

    An engine that has the model cannot be used any more.

    Raises: as `get_fp32_state_dict_from_zero_checkpoint`, and RuntimeError as `load_state_dict`.
    """
    weights = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    # It may be an engine's, whose parameters are divided, or views of its buffers.
    take_without_weights(model)
    model.cpu().load_state_dict(weights)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> list[Path]:
    """Write the fp32 weights; returns the files.

    One rank may call it, or all ranks, of which the first then writes and the others wait for it.

    Args:
        checkpoint_dir: The directory of `save_checkpoint`, or one checkpoint in it.
        output_dir: A directory; without `safe_serialization` also the name of a .bin or .pt file.
        max_shard_size: The largest safetensors file; a torch file is not split.
        safe_serialization: Write safetensors, with an index for several files; otherwise one
            pytorch_model.bin.
        tag: The name of a checkpoint; by default the newest.
        exclude_frozen_parameters: Leave out parameters that were not trained.

    Raises:
        CheckpointError: There is no such checkpoint, or the output exists.
        DamagedCheckpoint: The checksum of a tensor is wrong; nothing is left behind.
    """
    out = Path(output_dir)

    def write() -> list[Path]:
        checkpoint, chosen = _chosen(checkpoint_dir, tag, exclude_frozen_parameters)
        if safe_serialization:
            limit = sys.maxsize if max_shard_size is None else size(max_shard_size)
            return export_hf(checkpoint, chosen, out, shard_bytes=limit)
        file = out if out.suffix in (".bin", ".pt", ".pth") else out / "pytorch_model.bin"
        return export_torch(checkpoint, chosen, file)

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return write()
    # The first rank that comes writes, whichever it is: one that calls alone waits for nobody.
    store = group_store(f"zero_to_fp32 {out.absolute()}")
    if store.add("callers", 1) > 1:
        with transport_failures(f"waiting for {out}, which another rank writes"):
            store.wait(["written"], timedelta(seconds=group_timeout_s()))
        outcome = json.loads(store.get("written"))
        if "problem" in outcome:
            raise CheckpointError(outcome["problem"])
        return [Path(path) for path in outcome["files"]]
    # Whatever happens the others hear of it: they wait as long as the group's timeout.
    try:
        files = write()
    except Exception as error:
        store.set("written", json.dumps({"problem": str(error)}))
        raise
    store.set("written", json.dumps({"files": [str(path) for path in files]}))
    return files


def _chosen(
    directory: str | Path, tag: str | None, exclude_frozen: bool
) -> tuple[Candidate, ExportSelection]:
    checkpoint = one(f"{directory}@{tag}" if tag else str(directory))
    chosen = select(checkpoint, dtype=torch.float32)
    if exclude_frozen:
        manifest = checkpoint.manifest
        groups: list[dict[str, Any]] = manifest.meta["engine"]["groups"]
        trained = {name for group in groups for name in group["params"]}
        kept = {n: t for n, t in chosen.names.items() if t.kind != PARAM or t.fqn in trained}
        chosen = ExportSelection(names=kept, dtype=torch.float32)
    return checkpoint, chosen


def main(arguments: list[str] | None = None) -> int:
    """Convert the checkpoint of the command line; returns 2 if that fails."""
    parser = argparse.ArgumentParser(
        prog="python -m zero_deepspeed.utils.zero_to_fp32",
        description="Write the fp32 weights of a checkpoint for plain torch.",
    )
    parser.add_argument("checkpoint_dir", help="the save_dir of save_checkpoint()")
    parser.add_argument("output_dir", help="a new directory, or the name of a .bin file")
    parser.add_argument("--max_shard_size", default="5GB", metavar="SIZE")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors")
    parser.add_argument("-t", "--tag", help="the name of a checkpoint (default: the newest)")
    parser.add_argument("--exclude_frozen_parameters", action="store_true")
    parser.add_argument(
        "-d", "--debug", action="store_true", help="accepted for DeepSpeed, without effect"
    )
    options = vars(parser.parse_args(arguments))
    del options["debug"]
    try:
        written = convert_zero_checkpoint_to_fp32_state_dict(**options)
    except (ZeroError, OSError, argparse.ArgumentTypeError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    print("\n".join(str(path) for path in written))
    return 0


if __name__ == "__main__":
    sys.exit(main())
