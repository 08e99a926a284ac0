"""Which rank runs which samples in which step, and the proof that each was run once.

A library of its own: it needs torch, and no engine and no process group. A loop of a script's own:

    ledger = zero_data.Ledger("ledger", round=round, rank=rank, world=world)
    samples = zero_data.Samples(
        dataset, global_batch=64, micro_batch=8, rank=rank, world=world, ledger=ledger
    )
    for _ in range(epochs):
        for step in samples.steps():
            for batch, weight in step:             # this rank's micro-batches
                (weight * loss_of(model, batch)).backward()
            ...                                    # sum the gradients of all ranks
            optimizer.step()
            optimizer.zero_grad()
            step.commit()
        torch.save({"model": model.state_dict(), "samples": samples.state_dict()}, path)

`load_state_dict` goes on from there at any world size; a run that does so is another `round`, which
undoes what the round before had done after that checkpoint. `verify(read_ledger("ledger"),
len(dataset))` says whether every sample of every epoch was consumed exactly once.
"""

from zero_data.global_batch import BatchShape, Cursor
from zero_data.ledger import Ledger, Report, read_ledger, verify
from zero_data.plain_loop import Samples, Step

__all__ = ["BatchShape", "Cursor", "Ledger", "Report", "Samples", "Step", "read_ledger", "verify"]
