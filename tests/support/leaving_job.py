"""A training that leaves well, whatever started it: leaving_job.py KIND DIRECTORY.

Kinds: `alone` (`should_leave`, without torch), `ranks` (with a process group), `protect` (stock DDP
and a loader with processes of its own), `engine`. `DIRECTORY/steps-RANK` gets a line for each step
of a process; what the first two save is in `DIRECTORY/saved`.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

KIND, HERE = sys.argv[1], Path(sys.argv[2])
RANK = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
SAVED = HERE / "saved"


_last = 0


def did(step: int) -> None:
    """A step is done, its last micro-batch at least, which the test may see before the next."""
    global _last  # noqa: PLW0603 - it is the process that takes steps
    if step == _last:
        return
    _last = step
    with (HERE / f"steps-{RANK}").open("a") as file:
        file.write(f"{step}\n")
    time.sleep(0.05)


def own_loop(end: Callable[[], object] = bool) -> None:
    """A loop without the engine."""
    import zero_agent

    step = int(SAVED.read_text()) if SAVED.exists() else 0
    while True:
        step += 1
        did(step)
        if zero_agent.should_leave():
            if RANK == "0":
                SAVED.write_text(str(step))
            end()
            zero_agent.leave()


def ranks() -> None:
    """The same with a process group."""
    import torch.distributed as dist

    from zero_comm.worker.distributed import init_distributed

    init_distributed()
    assert dist.get_world_size() == 2
    own_loop(dist.destroy_process_group)


def protect() -> None:
    """Stock DDP."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import zero_torch
    from zero_comm.worker.distributed import init_distributed

    init_distributed()
    torch.set_num_threads(1)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(torch.randn(4096, 4)), batch_size=1, num_workers=2)
    run = zero_torch.protect(model, optimizer, loader, microbatches=2)
    run.load(HERE / "checkpoints")
    for (batch,) in run.loader:
        run.backward(model(batch).mean())
        did(run.global_step + 1)
        run.step()


def engine() -> None:
    """ZeRO."""
    import torch
    from torch.utils.data import TensorDataset

    import zero_engine

    torch.set_num_threads(1)
    engine = zero_engine.initialize(
        torch.nn.Linear(4, 1),
        training_data=TensorDataset(torch.randn(4096, 4)),
        config={"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 1e-3}}},
    )
    engine.load_checkpoint(HERE / "checkpoints")
    for (batch,) in engine.training_dataloader:
        engine.backward(engine(batch).mean())
        did(engine.global_steps + 1)
        engine.step()


{"alone": own_loop, "ranks": ranks, "protect": protect, "engine": engine}[KIND]()
