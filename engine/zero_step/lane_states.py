"""Lanes in checkpoints: a row of bytes for each, which the rank that holds the lane saves.

Must always hold: a load gives every rank the rows of the lanes that it holds now, whoever held them
when they were saved.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from zero_checkpoint.errors import ModelMismatch
from zero_checkpoint.format.manifest import Manifest
from zero_checkpoint.format.pieces import OTHER, Piece, State, TensorId, TensorInfo
from zero_checkpoint.format.table import Pieces, TensorTable
from zero_comm.exchange.collectives import Collectives
from zero_comm.worker.agent_link import agent_link, exit_on_peer_loss
from zero_contract.errors import ConfigError
from zero_data.lanes.order import LaneOrder
from zero_data.position_loader import Feed
from zero_step.staying import uncounted

_ROWS = TensorId(OTHER, "lanes")
"""[lanes, bytes], see `LaneOrder.rows`."""
_BEGINS = "the begin of an iteration"
_log = logging.getLogger(__name__)


def exchange_sizes(collectives: Collectives, own: Tensor) -> Tensor:
    """The exchange at the begin of an iteration, see `LaneOrder.meet`. Collective.

    Raises:
        SystemExit, PeerLost: See `exit_on_peer_loss`.
    """
    with exit_on_peer_loss(agent_link(collectives.rank)), uncounted():
        return collectives.everybodys(own, _BEGINS)


class LaneStates:
    """The lanes of one run, if it reads lanes, beside the rest of its state."""

    def __init__(self) -> None:
        self._memory: dict[int, Tensor] = {}
        """The row of each lane of this rank."""
        self._row_bytes = 0
        self._without: tuple[object, object] = (None, None)
        self._with = TensorTable(), Pieces()
        """Tensors and pieces of the last state with lanes, which are made once, and without."""

    def saved(self, state: State, order: LaneOrder | None) -> State:
        """A state to save, with the lanes as they are now."""
        if order is None or not order.row_bytes:
            return state
        rows = order.rows()
        if self._memory.keys() != rows.keys() or self._row_bytes != order.row_bytes:
            self._allocate(list(rows), order.row_bytes)
        for lane, row in rows.items():
            # A copy of the row: torch takes no memory that cannot be written to.
            self._memory[lane].copy_(torch.frombuffer(bytearray(row), dtype=torch.uint8))
        return self._joined(state, order.lanes)

    def check(self, manifest: Manifest, order: LaneOrder | None) -> None:
        """Check, before anything is read or made, that lanes can go on from a checkpoint.

        Raises:
            ModelMismatch: It has others.
        """
        if order is not None:
            try:
                order.check(manifest.meta["engine"].get("lanes"))
            except ConfigError as error:
                raise ModelMismatch(str(error)) from None

    def wanted(self, state: State, manifest: Manifest, order: LaneOrder | None) -> State:
        """A state to load, with the lanes that this rank holds."""
        info = manifest.tensors.get(_ROWS)
        self._allocate([], 0)
        if order is None or info is None:
            return state
        self._allocate([lane for lane in order.own() if lane < order.lanes], info.shape[1])
        return self._joined(state, order.lanes)

    def adopt(self, run: Mapping[str, Any], order: LaneOrder | None) -> None:
        """Go to the position of a checkpoint, to which the cursor has moved; its rows are read."""
        if order is None:
            return
        if run.get("lanes") is None and run.get("samples") and order.rank == 0:
            _log.warning(
                "the checkpoint does not say where its lanes were, as it was made with other data: "
                "they begin anew"
            )
        rows = {lane: row.numpy().tobytes() for lane, row in self._memory.items()}
        order.resume(run.get("lanes"), rows)

    def _allocate(self, lanes: list[int], row_bytes: int) -> None:
        self._row_bytes, self._without = row_bytes, (None, None)
        self._memory = {
            lane: torch.zeros(row_bytes, dtype=torch.uint8, device="cpu") for lane in lanes
        }

    def _joined(self, state: State, lanes: int) -> State:
        key = state.tensors, state.pieces
        if any(each is not before for each, before in zip(key, self._without, strict=True)):
            width = self._row_bytes
            table = TensorTable(state.tensors)
            table[_ROWS] = TensorInfo((lanes, width), torch.uint8)
            own = (Piece(_ROWS, lane * width, row) for lane, row in self._memory.items())
            self._without, self._with = key, (table, Pieces((*state.pieces, *own)))
        return replace(state, tensors=self._with[0], pieces=self._with[1])


def lanes_of(feed: Feed | None) -> LaneOrder | None:
    """The order of a loader that reads lanes; None for another."""
    order = feed.order if feed is not None else None
    return order if isinstance(order, LaneOrder) else None
