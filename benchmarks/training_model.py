"""The model and the tokens that every system of `training.py` trains: the same for all."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A GPT with its head tied to the embedding, and one rank's share of a batch."""

    width: int
    layers: int
    length: int
    vocabulary: int
    micro: int
    """Sequences per rank and step."""


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.embed = nn.Embedding(shape.vocabulary, width)
        self.position = nn.Parameter(torch.randn(shape.length, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, width // 64) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, shape.vocabulary, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())


def batch(shape: Shape, step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets [micro, length] of one rank in one step."""
    seed = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(0, shape.vocabulary, (shape.micro, shape.length + 1), generator=seed)
    return tokens[:, :-1], tokens[:, 1:]
