"""The samples of each rank in each step, and the proof that each sample was run exactly once.

An independent library: it needs torch, but no engine and no process group. In a plain loop:

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

`load_state_dict` resumes there at any world size; the resumed run is another `round`, which undoes
what the previous round had done after that checkpoint. `verify(read_ledger("ledger"),
len(dataset))` says whether every sample of every epoch was consumed exactly once.
"""

from zero_data.global_batch import BatchShape, Cursor
from zero_data.ledger import Ledger, Report, read_ledger, verify
from zero_data.plain_loop import Samples, Step

__all__ = ["BatchShape", "Cursor", "Ledger", "Report", "Samples", "Step", "read_ledger", "verify"]
