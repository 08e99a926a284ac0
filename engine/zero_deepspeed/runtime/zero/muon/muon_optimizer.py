"""DeepSpeed's `deepspeed.runtime.zero.muon.muon_optimizer`."""

from zero_engine.optim.muon import Muon as MuonWithAuxAdam

__all__ = ["MuonWithAuxAdam"]
