"""The promises of this project for stock PyTorch: FSDP2, DDP, and models in one process.

    run = zero_torch.protect(model, optimizer, loader, microbatches=12)
    for batch in run.loader:               # a batch is one micro-batch
        run.backward(model(batch))
        run.step()                         # acts at the last micro-batch of a step

The weights are the same bits at every world size, and under DDP and FSDP2. A script may call
`loss.backward()` and `optimizer.step()` itself.
"""

import zero_contract.needs_torch  # noqa: F401 - says what is not installed
from zero_comm.worker.distributed import await_round_in_script, leave_failures_to_agent
from zero_torch.checkpoints import Checkpoints
from zero_torch.protection import protect
from zero_torch.run import Run

__all__ = ["Checkpoints", "Run", "protect"]

leave_failures_to_agent()  # the script makes its process group after this import
await_round_in_script()
