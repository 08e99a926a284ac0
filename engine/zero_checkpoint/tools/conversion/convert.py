"""`zero-ckpt export` and `zero-ckpt import`: which reader or writer each one runs."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from pathlib import Path

import torch

from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.files.place import place
from zero_checkpoint.loading.candidates import Candidate
from zero_checkpoint.loading.foreign import hint
from zero_checkpoint.tools import locate, output
from zero_checkpoint.tools.conversion import adopt, export
from zero_checkpoint.tools.conversion.deepspeed import read_deepspeed
from zero_checkpoint.tools.conversion.foreign import Foreign, read_hf, read_torch
from zero_checkpoint.tools.parser import DTYPES
from zero_checkpoint.tools.records import Exported, Imported

_UNEXPLAINED = (
    "trained by no param group: %s. If one is a buffer, a second name of a tied parameter or "
    "frozen, pass --buffer NAME, --tie NAME=OTHER or --frozen NAME"
)
_SHARD_BYTES = 5 * 10**9
_LEFT_OUT = (
    "not imported, because a checkpoint has no place for it or it does not fit the model: %s%s"
)
_KEYS = ". If the model or its optimizer is among these, name it with --model-key, --optimizer-key"
_NO_STEP = "SOURCE does not name the step that it was saved at: taken as step 0; else pass --step N"
_FLAGS = {
    "key": ("torch",),
    "buffer": ("torch", "hf", "dcp"),
    "model_key": ("dcp",),
    "optimizer_key": ("dcp",),
}
"""Flags that only some formats of SOURCE use."""
_log = logging.getLogger(__name__)


def run_export(options: argparse.Namespace) -> None:
    """Carry out `export`; raises CheckpointError or OSError."""
    for flag in ("hf_config", "max_shard_size"):
        if getattr(options, flag) is not None and options.to != "hf":
            raise CheckpointError(f"--{flag.replace('_', '-')} is for --to hf only; leave it out")
    checkpoint = locate.one(options.checkpoint)
    if options.to == "dcp":
        _export_dcp(checkpoint, options)
        return
    config: Path | None = options.hf_config
    if config is None and options.to == "hf":
        # The Trainer saves the model's config with each checkpoint. Without it, from_pretrained
        # would take the weights for another model's.
        beside = checkpoint.path.parent
        if not (isinstance(beside, Path) and (beside / export.CONFIG).is_file()):
            raise CheckpointError(
                f"{checkpoint.path}: the model of these weights is named by a {export.CONFIG}, and "
                f"there is none in {beside}; name the directory of one with --hf-config, such as "
                "that of the model that the training began with. For weights alone use --to "
                "torch, or python -m zero_deepspeed.utils.zero_to_fp32 --safe_serialization"
            )
        config = beside
    dtype = getattr(torch, options.dtype) if options.dtype else None
    selection = export.select(checkpoint, dtype=dtype, strip_prefix=options.strip_prefix)
    with output.progress(checkpoint, quiet=options.json) as progress:
        if options.to == "torch":
            files = export.export_torch(checkpoint, selection, options.out, progress)
        else:
            files = export.export_hf(
                checkpoint,
                selection,
                options.out,
                shard_bytes=options.max_shard_size or _SHARD_BYTES,
                config=config,
                progress=progress,
            )
    _show(checkpoint, len(selection.names), files, options)


def _export_dcp(checkpoint: Candidate, options: argparse.Namespace) -> None:
    for flag in ("dtype", "strip_prefix"):
        if getattr(options, flag):
            raise CheckpointError(
                f"--{flag.replace('_', '-')} is not for --to dcp, which exports all of a training "
                "as it was saved; leave it out"
            )
    # DCP brings DTensors along: half a second that no other command should take.
    from zero_checkpoint.tools.conversion.dcp import export_dcp

    with output.progress(checkpoint, quiet=options.json) as progress:
        count, files = export_dcp(checkpoint, options.out, progress)
    _show(checkpoint, count, files, options)


def _show(
    checkpoint: Candidate, count: int, files: list[Path], options: argparse.Namespace
) -> None:
    record = Exported(
        checkpoint=str(checkpoint.path), tensors=count, files=[str(file) for file in files]
    )
    output.show(options.json, record, f"{checkpoint.path}: {count} tensors to {options.out}")


def _read_dcp(options: argparse.Namespace) -> Foreign:
    # Torch's own checkpoints take a second to import, which no other command needs.
    from zero_checkpoint.tools.conversion.dcp import read_dcp

    return read_dcp(
        options.source,
        allow_pickle=options.allow_pickle,
        model_key=options.model_key,
        optimizer_key=options.optimizer_key,
        buffers=tuple(options.buffer),
    )


_READERS: dict[str, Callable[[argparse.Namespace], Foreign]] = {
    "torch": lambda o: read_torch(
        o.source, allow_pickle=o.allow_pickle, key=o.key, buffers=o.buffer
    ),
    "hf": lambda o: read_hf(o.source, buffers=o.buffer),
    "dcp": _read_dcp,
    "deepspeed": lambda o: read_deepspeed(o.source, allow_pickle=o.allow_pickle),
}


def _read(options: argparse.Namespace) -> Foreign:
    """The model of SOURCE; an error names what SOURCE looks like instead."""
    try:
        return _READERS[options.kind](options)
    except CheckpointError as error:
        source = options.source
        if source.is_dir() and (locate.is_checkpoint(source) or locate.roots(source)):
            raise CheckpointError(
                f"{error}. {source} holds checkpoints of this engine, which need no import: give "
                "it to load_checkpoint(), or to zero-ckpt show"
            ) from error
        meant = hint(source) if source.is_dir() else ""
        if meant.endswith(f" import {source} DIR --from {options.kind}"):
            raise  # the hint would repeat the command that was typed
        raise CheckpointError(f"{error}{meant}") from error


def run_import(options: argparse.Namespace) -> None:
    """Carry out `import`; raises CheckpointError or OSError."""
    for name, formats in _FLAGS.items():
        if getattr(options, name) and options.kind not in formats:
            flag = f"--{name.replace('_', '-')}"
            raise CheckpointError(
                f"{flag} is for --from {' or '.join(formats)}, not {options.kind}; leave it out"
            )
    root = place(options.dir)
    # Before SOURCE is read, which may take minutes.
    if root.exists() and not root.is_dir():
        raise CheckpointError(
            f"{root}: this is a file; give a directory of checkpoints, or a new one"
        )
    with output.lasting(f"reading {options.source}", quiet=options.json):
        foreign = adopt.tie(_read(options), dict(options.tie))
    foreign = adopt.freeze(foreign, options.frozen)
    if foreign.left_out:
        keys = _KEYS if options.kind == "dcp" else ""
        _log.warning(_LEFT_OUT, ", ".join(foreign.left_out), keys)
    if foreign.moments and options.step is None and "step" not in foreign.run:
        _log.warning(_NO_STEP)
    if loose := adopt.unexplained(foreign):
        _log.warning(_UNEXPLAINED, ", ".join(loose))
    computed = options.compute_dtype or str(foreign.run.get("dtype")).removeprefix("torch.")
    dtypes = adopt.Dtypes(
        trained=None if options.dtype == "keep" else getattr(torch, options.dtype),
        computed=getattr(torch, computed) if computed in DTYPES else None,
    )
    source = f"{options.kind}: {options.source}"
    text = f"saving {len(foreign.params)} parameters in {root}"
    with output.lasting(text, quiet=options.json):
        path = adopt.adopt(
            root, foreign, source=source, tag=options.tag, step=options.step, dtypes=dtypes
        )
    kinds = sorted(foreign.moments)
    record = Imported(path=str(path), parameters=len(foreign.params), optimizer_kinds=kinds)
    also = f", with {', '.join(kinds)}" if kinds else ", without optimizer state"
    output.show(options.json, record, f"{path}: {len(foreign.params)} parameters{also}")
