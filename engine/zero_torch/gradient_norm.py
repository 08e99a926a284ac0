"""The norm of gradients under stock PyTorch: which rank norms which elements of each.

Must always hold: also where the script asks torch for it (`clip_grad_norm_`), the norm does not
depend on the number of ranks. Torch adds the squares of shards in the order of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import utils
from torch.nn.utils import clip_grad

from zero_comm.exchange.collectives import Collectives
from zero_contract.errors import ZeroError
from zero_step.agree import Agreement
from zero_step.gradients.division import Division, chunks, shares
from zero_step.gradients.norm import block_norms, merged, sum_of_squares
from zero_torch.ordered_gradients import OrderedGradients, as_real
from zero_torch.wrapped import local


class GradientNorm:
    """The agreement on the norm of the gradients of some parameters."""

    def __init__(
        self,
        trained: Mapping[str, nn.Parameter],
        collectives: Collectives,
        device: torch.device,
    ) -> None:
        self._names = list(trained)
        self._shard = collectives.shards[collectives.rank]
        self._divisions = [_division_of(each, collectives.world) for each in trained.values()]
        self.agreement = Agreement(collectives, self._divisions, device)

    def parts(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The part of each gradient that this rank norms, flat, as real numbers."""
        pairs = zip(gradients, self._divisions, strict=True)
        return [_part(gradient, division, self._shard) for gradient, division in pairs]

    def first_not_finite(self) -> str:
        """The first parameter whose gradient is not finite. Collective."""
        number, _ = self.agreement.first_not_finite()
        return self._names[number]


_clips: Any = clip_grad
_torchs, _grouped = clip_grad._get_total_norm, _clips._group_tensors_by_device_and_dtype
_runs: WeakSet[Norms] = WeakSet()


class Norms:
    """The norms of a run, which keeps this: torch asks here, too, for those of its gradients."""

    def __init__(
        self,
        gradients: OrderedGradients,
        collectives: Collectives,
        device: torch.device,
        *,
        is_ready: Callable[[bool], bool],
        guard: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Answer from now on.

        Args:
            gradients: Those of the run.
            collectives: Those of the run.
            device: Where the gradients are.
            is_ready: Says whether the gradients of a step are there, with the weights of their
                tokens. Given whether they are sharded; then it is collective.
            guard: A context around an exchange, which ends it early if a peer is lost.
        """
        self._gradients, self._is_ready, self._guard = gradients, is_ready, guard
        self._where = collectives, device
        self._made: dict[tuple[str, ...], GradientNorm] = {}
        """By the names of the parameters."""
        # torch's clip_grad_norm_ calls the first; scripts and torchtitan call the second.
        clip_grad._get_total_norm = utils.get_total_norm = _total_norm
        # What torch does to gradients by itself begins with this call, as in clip_grad_value_.
        _clips._group_tensors_by_device_and_dtype = _in_groups
        _runs.add(self)

    def end(self) -> None:
        """Answer torch no more."""
        _runs.discard(self)

    def of(self, trained: Mapping[str, nn.Parameter]) -> GradientNorm:
        """The agreement on the norm of the gradients of some parameters."""
        if (names := tuple(trained)) not in self._made:
            self._made[names] = GradientNorm(trained, *self._where)
        return self._made[names]

    def asked(self, gradients: Sequence[Tensor], order: float) -> Tensor | None:
        """The norm that torch is asked for, []; None if it has to answer by itself.

        Collective if the gradients are sharded, as it is in torch: of whole ones, one rank alone
        may ask, as for its log.

        Raises:
            ZeroError: It would depend on the number of ranks.
        """
        trained = self._gradients.trained
        # By identity: torch is given the tensors of `.grad` themselves.
        owners = {id(each.grad): name for name, each in trained.items() if each.grad is not None}
        names = [owners[id(each)] for each in gradients if id(each) in owners]
        sharded = any(isinstance(each, DTensor) for each in gradients)
        # Of whole ones torch may count one twice, as it does.
        is_ours = order == 2 and len(set(names) if sharded else names) == len(gradients)
        # Of others' gradients torch may answer; a maximum is the same in any order.
        if (
            not names
            or order == math.inf
            or not (is_ours or sharded)
            or not self._is_ready(sharded)
        ):
            return None
        if not is_ours:
            raise ZeroError(
                f"a norm of order {order:g} of {len(gradients)} gradients, of which this run has "
                f"{len(set(names))}, would depend on the number of ranks; clip by one of order 2 "
                "or infinity, the gradients of each run by themselves, and each of them once"
            )
        double = any(each.dtype in (torch.float64, torch.complex128) for each in gradients)
        kind = torch.float64 if double else torch.float32
        total = torch.zeros((), dtype=kind, device=gradients[0].device)
        if not sharded:
            # The norm that shards of them would have, added up in the same blocks.
            norms = [block_norms(_flat(each).to(kind)) for each in gradients]
            return total + merged([sum_of_squares(torch.cat(norms)).tolist()])
        norm = self.of({name: trained[name] for name in names})
        with self._guard():
            total += norm.agreement.reach(norm.parts(gradients), torch.zeros(0)).norm
        return total

    def see(self, tensors: Sequence[Tensor]) -> None:
        """Let gradients have the weights of their tokens before torch itself looks at them."""
        own = {id(each.grad) for each in self._gradients.trained.values()}
        if any(id(each) in own for each in tensors):
            self._is_ready(False)


def scale(trained: Mapping[str, nn.Parameter], factor: float) -> None:
    """Multiply all gradients that there are."""
    if factor != 1:
        gradients = (each.grad for each in trained.values())
        torch._foreach_mul_([local(each) for each in gradients if each is not None], factor)


def _total_norm(
    tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: Any = None
) -> Tensor:
    given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    answers = (each.asked(given, float(norm_type)) for each in _runs)
    # All runs of the process are asked, since nothing says whose the gradients are.
    total = next((each for each in answers if each is not None), None)
    if total is None:
        return _torchs(given, norm_type, error_if_nonfinite, foreach)
    if error_if_nonfinite:
        _torchs([total], error_if_nonfinite=True)  # raises what it would
    if not isinstance(given[0], DTensor):
        return total
    # As torch answers for sharded gradients: a script may call full_tensor().
    mesh = given[0].device_mesh
    return DTensor.from_local(total, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _in_groups(tensors: Any, *with_indices: Any) -> Any:
    for each in tuple(_runs):
        each.see(tensors[0])
    return _grouped(tensors, *with_indices)


def _division_of(parameter: Tensor, world: int) -> Division:
    reals = 2 if parameter.is_complex() else 1  # in one element
    if not isinstance(parameter, DTensor):
        return shares(parameter.numel() * reals, world)
    sharding, shards = parameter.placements[-1], parameter.device_mesh.size(-1)
    assert isinstance(sharding, Shard)
    division = chunks(parameter.shape, sharding.dim, shards, reals=reals)
    # Of the replicas under HSDP the first ones norm all elements, the others none.
    others = (division.stride,) * (world - shards)
    return replace(division, bounds=division.bounds + others)


def _part(gradient: Tensor, division: Division, shard: int) -> Tensor:
    flat = _flat(gradient)
    if not isinstance(gradient, DTensor):
        flat = flat[division.bounds[shard] :]
    return flat[: division.length(shard)]


def _flat(gradient: Tensor) -> Tensor:
    """The elements of a gradient that this rank has, as real numbers."""
    return as_real(local(gradient).resolve_conj().reshape(-1))
