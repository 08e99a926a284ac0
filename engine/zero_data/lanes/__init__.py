"""Lanes: any data at any world size; and stages that compose what lanes read."""

from zero_data.lanes.packing import Pack, Packed, cu_seqlens
from zero_data.lanes.stages import Mixture, Shuffle

__all__ = ["Mixture", "Pack", "Packed", "Shuffle", "cu_seqlens"]
