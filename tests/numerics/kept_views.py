"""A script that keeps views of divided parameters from inside hooks, and reads them later."""

from __future__ import annotations

import json

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.training import config, make_engine, train


def train_and_keep(bf16: bool, kept: list[Tensor] | None) -> str:
    """Two steps, with or without keeping views of each parameter; the hash at the end."""
    engine = make_engine(config(3, bf16=bf16))

    def keep(module: nn.Module, *_: object) -> None:
        for param in module.parameters(recurse=False):
            kept.extend([param.detach(), param.data.view(-1)[1:], param.detach().t()])

    for module in engine.module.modules() if kept is not None else ():
        module.register_forward_pre_hook(keep)
        module.register_forward_hook(keep)
    train(engine, 2)
    return engine.weight_hash()


def main() -> None:
    """For fp32 and bf16 as JSON: whether all that was kept is NaN, and the hash is the same."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    seen = []
    for bf16 in (False, True):
        kept: list[Tensor] = []
        same = train_and_keep(bf16, kept) == train_and_keep(bf16, None)
        read = [bool(view.isnan().all()) for view in kept]
        read += [bool(torch.zeros_like(view).lerp_(view, 0.1).isnan().all()) for view in kept]
        seen.append({"views": len(kept) > 100, "nan": all(read), "same": same})
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
