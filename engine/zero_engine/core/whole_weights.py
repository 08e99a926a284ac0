"""An nn.Module around the script's module, in its place, and its weights as torch's dictionaries.

Must always hold: as torch's wrappers do, it puts `module.` before every name; no parameter can be
taken away from the buffer that it is a view of; every rank calls the methods of weights, at every
stage; a rank that does not receive a dictionary holds its shards and one unit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, Self, SupportsIndex

from torch import Tensor, nn

from zero_comm.worker.agent_link import AgentLink, exit_on_peer_loss
from zero_contract.errors import ZeroError
from zero_engine.core.given_weights import load_given
from zero_engine.offload_states import WEIGHTS
from zero_engine.parts import Core
from zero_engine.sharding.weights import module_state_dict


class WholeWeights(nn.Module):
    """The part of the engine around its module, in which it looks up what it does not have."""

    module: nn.Module
    _core: Core
    _link: AgentLink

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        del self.training  # so that it, too, is looked up in the module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Before `module` is set, looking it up in itself would never end; and the special
            # methods that copy and pickle look up are those of the engine, not of the module.
            if name == "module" or name.startswith("__"):
                raise
        try:
            return getattr(self.module, name)
        except AttributeError as error:
            ours, its = type(self).__name__, type(self.module).__name__
            raise AttributeError(
                f"neither {ours!r} nor its module {its!r} has an attribute {name!r}",
                name=name,
                obj=self,
            ) from error

    def train(self, mode: bool = True) -> Self:
        """Put the module in training or evaluation mode."""
        self.module.train(mode)
        return self

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the module's forward, as `torch.compile` does, with its arguments."""
        self.module.compile(*args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """`.to()`, `.half()` and `.cuda()`: refused, unless they change nothing."""
        for name, param in self.named_parameters():
            if fn(param) is not param:
                raise ZeroError(
                    f"to(), half() and the like would take {name} away from the engine, which "
                    "steps it where it is; choose the dtype in the config, or call them on the "
                    "model before initialize()"
                )
        return super()._apply(fn, recurse)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        raise ZeroError(
            "an engine cannot be copied or pickled: it is one rank's part of a run; copy "
            "engine.module, or call engine.save_checkpoint() or engine.module_state_dict()"
        )

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
