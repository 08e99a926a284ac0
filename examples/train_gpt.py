"""Train a byte-level GPT on real text, on any number of nodes.

    python examples/train_gpt.py                          one process, no launcher
    zero-agent --nnodes=1:4 --max-restarts=3 examples/train_gpt.py

When it is started again, on any number of nodes and at any ZeRO stage, the script resumes from the
last checkpoint. Its final weights are the same, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import zero_deepspeed

HERE = Path(__file__).resolve().parent
VOCABULARY = 256  # one token per byte
TEXT_SUFFIXES = {".py", ".txt", ".md", ".rst", ".c", ".h"}


class Text(Dataset[tuple[Tensor, Tensor]]):
    """Consecutive pieces of text; a sample predicts each byte from the bytes before it."""

    def __init__(self, source: Path, length: int, samples: int | None) -> None:
        enough = samples * length + 1 if samples else None
        data = read_text(source, enough)
        self.length = length
        self.tokens = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.samples = (len(data) - 1) // length
        if self.samples < 1 or (samples and self.samples < samples):
            raise SystemExit(
                f"--data {source}: {len(data)} bytes of text make {self.samples} samples of "
                f"{length}; give more text, or a smaller --samples"
            )

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.length
        window = self.tokens[start : start + self.length + 1].long()
        return window[:-1], window[1:]


def read_text(source: Path, enough: int | None) -> bytes:
    """The bytes of a file, or of the text files below a directory in a fixed order."""
    if source.is_file():
        return source.read_bytes()[:enough]
    if not source.is_dir():
        raise SystemExit(f"--data {source}: there is no such file or directory")
    data = bytearray()
    for path in text_files(source):
        data += path.read_bytes()
        if enough is not None and len(data) >= enough:
            break
    return bytes(data[:enough])


def text_files(directory: Path) -> Iterator[Path]:
    """Text files in an order independent of the file system, without installed packages."""
    for folder, subfolders, names in os.walk(directory):
        subfolders[:] = sorted(set(subfolders) - {"site-packages", "__pycache__"})
        for name in sorted(names):
            if Path(name).suffix in TEXT_SUFFIXES:
                yield Path(folder, name)


class Block(nn.Module):
    """Attention and feed-forward, each with a residual; [batch, time, width] in and out."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(batch, length, width)
        x = x + self.dropout(self.project(mixed))
        out: Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return out


class GPT(nn.Module):
    """A small decoder with tied embeddings; returns the mean loss of a batch."""

    def __init__(self, *, width: int, layers: int, heads: int, length: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--config", type=Path, default=HERE / "gpt.json", help="engine config")
    parser.add_argument("--stage", type=int, choices=range(4), help="ZeRO stage (the config's)")
    parser.add_argument("--data", type=Path, default=Path(sysconfig.get_path("stdlib")))
    parser.add_argument("--samples", type=int, help="number of samples (default: all)")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--checkpoints", default="runs/gpt/checkpoints", help="or s3://...")
    parser.add_argument("--save-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--ledger", type=Path, help="record which samples each step consumed")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--dropout", type=float, default=0.1)
    return parser.parse_args()


def read_config(args: argparse.Namespace) -> dict[str, Any]:
    """The config file of the engine, with the changes of the command line."""
    try:
        config: dict[str, Any] = json.loads(args.config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SystemExit(f"--config {args.config}: {error}") from None
    if args.stage is not None:
        config.setdefault("zero_optimization", {})["stage"] = args.stage
    if args.ledger is not None:
        config.setdefault("elastic", {})["sample_ledger"] = str(args.ledger)
    return config


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(0)  # every rank begins with the same weights
    model = GPT(
        width=args.width, layers=args.layers, heads=4, length=args.length, dropout=args.dropout
    )
    engine, _, loader, _ = zero_deepspeed.initialize(
        model=model,
        training_data=Text(args.data, args.length, args.samples),
        config=read_config(args),
    )
    assert loader is not None, "initialize() makes one when it is given training data"
    engine.load_checkpoint(args.checkpoints)
    if engine.global_rank == 0:
        print(f"step {engine.global_steps}: training on {engine.world_size} workers", flush=True)
    started, samples = time.perf_counter(), engine.global_samples
    for _ in range(loader.epoch, args.epochs):
        for tokens, targets in loader:
            engine.backward(engine(tokens.to(engine.device), targets.to(engine.device)))
            at_boundary = engine.is_gradient_accumulation_boundary()
            engine.step()
            if not at_boundary:
                continue
            # The rank is asked each time: it may change where workers stay (elastic.in_place).
            if engine.global_rank == 0 and engine.global_steps % 10 == 0:
                seconds = time.perf_counter() - started
                rate = (engine.global_samples - samples) * args.length / seconds
                print(
                    f"step {engine.global_steps}: loss {engine.mean_loss:.4f}, "
                    f"{rate:,.0f} tokens/s, world size {engine.world_size}",
                    flush=True,
                )
            if engine.checkpoint_due(args.save_every):
                engine.save_checkpoint(args.checkpoints)
    engine.save_checkpoint(args.checkpoints)
    digest = engine.weight_hash()
    if engine.global_rank == 0:
        print(f"done: {engine.global_steps} steps, weight hash {digest}", flush=True)
    engine.destroy()  # waits for the last checkpoint, also for room on a disk that is full


if __name__ == "__main__":
    main()
