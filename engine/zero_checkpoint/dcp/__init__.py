"""Universal checkpoints for programs that save with torch.distributed.checkpoint (DCP).

    from zero_checkpoint.dcp import Reader, Writer

    dcp.save(state, storage_writer=Writer("checkpoints", step=step))
    dcp.load(state, storage_reader=Reader("checkpoints"))

`dcp.async_save` works, too. DCP's planners decide which rank writes and reads what, of DTensors
with any placements. The model and the optimizer in the state are those that `zero_torch` and
`zero_engine` save: each loads the checkpoints of the others, at any world size.
"""

from zero_checkpoint.dcp.reader import Reader
from zero_checkpoint.dcp.writer import Writer

__all__ = ["Reader", "Writer"]
