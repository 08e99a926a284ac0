"""The source of any dataset: how its samples are divided among lanes, and how it says where it is.

Must always hold: what a dataset yields in a lane depends on (lane, lanes, epoch) alone.
"""

from zero_data.lanes.adapters.find import reads_lanes, source_of

__all__ = ["reads_lanes", "source_of"]
