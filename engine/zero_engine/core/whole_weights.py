"""The weights of a sharded module as torch's dictionaries.

Must always hold: every rank calls these methods, at every stage; a rank that does not receive a
dictionary holds its shards and one unit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from zero_comm.worker.agent_link import AgentLink, exit_on_peer_loss
from zero_engine.core.given_weights import load_given
from zero_engine.core.wrapping_module import WrappingModule
from zero_engine.offload_states import WEIGHTS
from zero_engine.parts import Core
from zero_engine.sharding.weights import module_state_dict


class WholeWeights(WrappingModule):
    """The part of the engine that gives and takes whole weights."""

    _core: Core
    _link: AgentLink

    def module_state_dict(self, *, rank: int | None = None) -> dict[str, Tensor]:
        """The module's whole state_dict on the CPU, at any stage. Every rank calls it.

        Args:
            rank: The rank that receives it; the others receive an empty dict, and need no memory
                for the model. None: every rank receives it.
        """
        return self._whole("module_state_dict()", here=self._is(rank))

    def get_fp32_state_dict(self, *, rank: int | None = None) -> dict[str, Tensor]:
        """The same in the highest precision, frozen parameters included."""
        return self._whole("get_fp32_state_dict()", here=self._is(rank), highest=True)

    def _is(self, rank: int | None) -> bool:
        return rank in (None, self._core.collectives.rank)

    def _whole(
        self, caller: str, *, here: bool, highest: bool = False, left_out: Collection[str] = ()
    ) -> dict[str, Tensor]:
        core = self._core
        core.moved.need(caller, WEIGHTS)
        with exit_on_peer_loss(self._link):
            return module_state_dict(
                core.module,
                core.units,
                core.aliases,
                highest=highest,
                left_out=left_out,
                here=here,
            )

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load weights into the module, at any stage. Every rank calls it.

        Args:
            state_dict: Tensors by the names of `state_dict()`, which begin with `module.`.
                Parameters are those of rank 0, each rank loads its own buffers; another rank that
                passes an empty dictionary takes the buffers of rank 0, too. Beside the dictionary
                a rank needs memory for its shards and one unit.
            strict: As for torch.
            assign: Without effect: weights are always copied into the engine's buffers.

        Returns:
            The missing and the unexpected keys.

        Raises:
            RuntimeError: The dictionary of a rank does not fit, on all ranks; no rank has changed.
                Or a rank has no memory for a unit; the weights are inconsistent then.
        """
        del assign
        load = partial(super().load_state_dict, state_dict, strict)
        given = self._core.collectives.rank == 0 or bool(state_dict)
        with exit_on_peer_loss(self._link):
            return load_given(self._core, self, load, given=given)
