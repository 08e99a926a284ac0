"""Random module trees, as plain values that hypothesis draws and every rank builds alike.

A tree is a list of nodes, each a residual step on vectors of WIDTH: an odd bottleneck, a norm,
dropout, a scalar parameter, a parameter that nothing uses, a module that several places share, a
frozen one; or further nodes, in a ModuleList or a Sequential. Whoever calls a node of the kind
"apart" leaves the node out and calls the modules inside of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import Dataset

WIDTH = 6

_LEAVES = st.one_of(
    st.tuples(st.just("bottleneck"), st.integers(1, 80), st.booleans()),
    st.tuples(st.just("frozen"), st.integers(1, 5)),
    st.tuples(st.just("unused"), st.integers(1, 70)),
    st.sampled_from([("norm",), ("drop",), ("scalar",), ("shared",), ("buffer",)]),
)
NODES = st.recursive(
    _LEAVES,
    lambda children: st.tuples(
        st.sampled_from(["list", "sequential", "apart"]),
        st.lists(children, min_size=1, max_size=3),
    ),
    max_leaves=8,
)
TREES = st.lists(NODES, min_size=1, max_size=4)


class Bottleneck(nn.Module):
    """Through another width and back."""

    def __init__(self, size: int, bias: bool = True) -> None:
        super().__init__()
        self.inner, self.outer = (
            nn.Linear(WIDTH, size, bias=bias),
            nn.Linear(size, WIDTH, bias=bias),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(torch.tanh(self.inner(x)))


class Unused(nn.Identity):
    """Has a parameter that no forward reads."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.idle = nn.Parameter(torch.randn(size))


class Scalar(nn.Module):
    """One factor, of no dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Shared(nn.Module):
    """A module that other places have as well."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.shared(x))


class Offset(nn.Module):
    """A buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.randn(WIDTH) / 9)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.offset


class Apart(nn.Sequential):
    """Whoever has it calls its members, and not itself."""


def call(node: nn.Module, x: Tensor) -> Tensor:
    """What a node makes of x; a node that is `Apart` is left out."""
    if not isinstance(node, Apart):
        return node(x)
    for member in node:
        x = call(member, x)
    return x


class Listed(nn.Module):
    """A ModuleList, somewhere in the tree."""

    def __init__(self, children: list[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(children)

    def forward(self, x: Tensor) -> Tensor:
        for member in self.members:
            x = call(member, x)
        return x


def make_node(tree: Any, shared: nn.Module) -> nn.Module:
    """The module that a node stands for."""
    kind, *facts = tree
    makers: dict[str, Callable[..., nn.Module]] = {
        "bottleneck": Bottleneck,
        "frozen": lambda size: Bottleneck(size).requires_grad_(False),
        "unused": Unused,
        "norm": lambda: nn.LayerNorm(WIDTH),
        "drop": lambda: nn.Dropout(0.3),
        "scalar": Scalar,
        "shared": lambda: Shared(shared),
        "buffer": Offset,
        "list": lambda children: Listed([make_node(each, shared) for each in children]),
        "sequential": lambda children: nn.Sequential(*(make_node(c, shared) for c in children)),
        "apart": lambda children: Apart(*(make_node(each, shared) for each in children)),
    }
    return makers[kind](*facts)


class Tree(nn.Module):
    """The nodes of a tree one after the other, and a mean; at least the root is trained."""

    def __init__(self, tree: Any) -> None:
        super().__init__()
        shared = nn.Linear(WIDTH, WIDTH)
        self.nodes = nn.ModuleList(make_node(each, shared) for each in tree)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for node in self.nodes:
            x = call(node, x)
        return self.head(x).square().mean()


def build(tree: Any) -> Tree:
    """The same model on every rank."""
    torch.manual_seed(3)
    return Tree(tree)


def grouped(model: nn.Module, groups: int) -> list[dict[str, Any]]:
    """The parameters dealt out to groups with different options; frozen ones are in, too."""
    dealt: list[dict[str, Any]] = [
        {"params": [], "lr": 0.02 / (1 + number), "weight_decay": 0.1 * number}
        for number in range(groups)
    ]
    for position, param in enumerate(model.parameters()):
        dealt[position % groups]["params"].append(param)
    return [group for group in dealt if group["params"]]


class Vectors(Dataset[Tensor]):
    """`size` vectors; each depends on its index alone."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
