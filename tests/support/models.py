"""A tiny GPT with everything that goes wrong in sharded training, and data for it.

Tied embedding and head, a frozen parameter in every block, a buffer, one that does not persist,
a parameter that nothing uses, dropout, odd sizes, and two param groups with different options.
All of it is random, so that another seed is another model in every part.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH = 131, 36, 3, 2, 12


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.scale = nn.Parameter(1 + torch.rand(WIDTH) / 9, requires_grad=False)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        qkv = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, WIDTH // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).reshape(b, t, WIDTH)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x) * self.scale))))


class TinyGPT(nn.Module):
    """Returns the mean loss of predicting each token's successor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.head.weight = self.embed.weight
        self.unused = nn.Parameter(torch.randn(17))
        self.register_buffer("temperature", 0.5 + torch.rand(1, 2))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.embed(inputs) + self.position[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float() * self.temperature[0, 0].float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_model(seed: int = 7) -> TinyGPT:
    """The same model for the same seed."""
    torch.manual_seed(seed)
    return TinyGPT()


def param_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weight decay for matrices, none and another rate for the rest; frozen ones are in, too."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0, "lr": 5e-3},
    ]


class Tokens(Dataset[Tensor]):
    """`size` sequences; each depends on its index alone."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 + index)
        return torch.randint(0, VOCABULARY, (LENGTH + 1,), generator=generator)
