"""A script that looks at divided parameters in many ways, and tells what it got."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.training import config, make_engine, train


def saved_and_loaded(param: Tensor) -> Tensor:
    """Through a file."""
    file = io.BytesIO()
    torch.save(param.data, file)
    file.seek(0)
    loaded: Tensor = torch.load(file)
    return loaded


WAYS: dict[str, Callable[[nn.Parameter], Any]] = {
    "norm": lambda p: p.norm(),
    "mean": lambda p: p.data.mean(),
    "print": lambda p: float("nan") if "nan" in str(p) else str(p),
    "item": lambda p: p.flatten()[0].item(),
    "list": lambda p: p.tolist(),
    "numpy": lambda p: p.detach().numpy().copy(),
    "view": lambda p: p.view(-1).detach() + 1,
    "double": lambda p: p.detach().double(),
    "clone": lambda p: p.detach().clone(),
    "deepcopy": copy.deepcopy,
    "save": saved_and_loaded,
    "average": lambda p: torch.zeros_like(p).lerp_(p.detach(), 0.1),
    "product": lambda p: torch.ones(1, p.shape[-1]) @ p.view(-1, p.shape[-1]).t(),
    "slope": torch.func.grad(lambda p: p.square().sum()),
}


def look(param: nn.Parameter) -> dict[str, bool]:
    """By way, whether it gave NaN and nothing else."""
    seen = {name: torch.as_tensor(way(param)).detach() for name, way in WAYS.items()}
    return {name: bool(values.isnan().all()) for name, values in seen.items()}


def main() -> None:
    """What was seen before and after the first steps, as JSON on standard output."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    engine = make_engine(config(3))
    seen = []
    for steps in (1, 2):
        seen += [look(param) for param in engine.module.parameters()]
        train(engine, steps)
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
