"""The samples of each rank in each step, and the proof that each sample was run exactly once.

An independent library: it needs torch, but no engine and no process group. `global_batch` alone
says which samples a micro-batch has and which rank runs it; loaders read them from the position of
a `Cursor` on, which the owner of the loop moves when a step counts. `verify(read_ledger(directory),
len(dataset))` says whether every sample of every epoch was consumed exactly once; what a resumed
run, another `round` of the ledger, has done again counts once.
"""

import zero_contract.needs_torch  # noqa: F401 - says what is not installed
from zero_data.global_batch import BatchShape, Cursor
from zero_data.lanes.lanes import Lanes
from zero_data.ledger import Ledger, Report, read_ledger, verify

__all__ = ["BatchShape", "Cursor", "Lanes", "Ledger", "Report", "read_ledger", "verify"]
