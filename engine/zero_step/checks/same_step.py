"""What is the same on all ranks in a step; the options of param groups throughout it, too.

Must always hold: where they differ among the ranks, all know before weights change. Otherwise each
would train weights of its own, or its shard at another rate: a rate that follows from the loss of
one rank's samples, as by ReduceLROnPlateau, is enough. And what changes them for every micro-batch
is named: there are more of these in a step of fewer ranks.

Compared are numbers, text, and tuples of them.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from zero_comm.exchange.collectives import Collectives
from zero_comm.exchange.objects import gather_objects
from zero_contract.errors import ZeroError
from zero_step.agree import Agreed, Agreement
from zero_step.checks.replicas import Replicas

_EXACT = (1 << 24) - 1
"""The largest whole number of 24 bits, which fp32 holds exactly."""
_DIFFERS = (
    "param group {}: {} is {} on rank 0 and {} on rank {}, so the ranks would train different "
    "weights; give all ranks the same: a schedule that follows a metric needs that of all ranks, "
    "such as the mean loss of the step"
)

_IN_STEP = (
    "{} of param group {} has changed from {} to {} in the middle of a step, as by a schedule that "
    "is stepped for every batch: how often depends on the number of ranks; "
)


def _plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _options(optimizer: torch.optim.Optimizer, max_norm: float | None) -> list[dict[str, Any]]:
    """By group, whatever their order is, and those of the step."""
    # A tensor on a device is not read: the host would wait for it, in every step.
    groups: list[dict[str, Any]] = [] if max_norm is None else [{"max_norm": max_norm}]
    for group in optimizer.param_groups:
        told = {}
        for key, value in group.items():
            if isinstance(value, Tensor) and value.is_cpu and value.numel() == 1:
                told[key] = value.item()
            elif key != "params" and _plain(value):
                told[key] = value
        groups.append(told)
    return sorted(groups, key=json.dumps)


class SameStep:
    """What has to be the same on all ranks in a step: options, and the parameters themselves."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, replicas: Replicas, collectives: Collectives
    ) -> None:
        self._optimizer = optimizer
        self._replicas = replicas
        self._collectives = collectives

    def agree(
        self,
        agreement: Agreement,
        shards: Sequence[Tensor],
        notes: Tensor,
        digest: Tensor | int = 0,
        /,
        *,
        max_norm: float | None = None,
    ) -> Agreed:
        """Reach an agreement that compares them, and a digest of the caller's. Collective.

        `max_norm`: an option of this step, beside those of its optimizer.

        Raises:
            ZeroError: They differ; names the first one.
            Diverged, PeerLost: See `Agreement.reach`.
        """
        options = _options(self._optimizer, max_norm)
        checksum = zlib.crc32(json.dumps(options).encode()) & _EXACT
        told = self._collectives.numbers([checksum], notes.device).long()[0]
        own = told + self._replicas.digest(notes.device) + digest
        agreed = agreement.reach(shards, notes, own)
        if not agreed.alike:
            self._compare(options)
            self._replicas.check()
        return agreed

    def stepped(self) -> None:
        """The optimizer has stepped."""
        self._replicas.stepped()

    def _compare(self, options: list[dict[str, Any]]) -> None:
        gather = self._collectives.everybodys
        everybodys = gather_objects(options, "param groups", gather)
        for rank, others in enumerate(everybodys):
            none: dict[str, Any] = {}  # a rank may have a further group
            pairs = zip_longest(everybodys[0], others, fillvalue=none)
            for number, (ours, theirs) in enumerate(pairs):
                for key in sorted(ours.keys() | theirs.keys()):
                    mine, other = ours.get(key), theirs.get(key)
                    if json.dumps(mine) != json.dumps(other):  # as they are told: NaN is itself
                        raise ZeroError(_DIFFERS.format(number, key, mine, other, rank))


class OptionsOfStep:
    """The options of an optimizer in a step, which are asked for often and change seldom."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._read: dict[int, tuple[Tensor, int, float]] = {}
        """By `id`, of those that are tensors: the tensor, its version, its value."""
        self._begun: list[dict[str, Any]] = []
        """The options with which the step has begun."""

    def begin(self) -> None:
        """Begin a step with what they are now."""
        self._begun = self._now()

    def change(self) -> str:
        """The first change since the begin of the step, in words; "" if there is none."""
        if (now := self._now()) == self._begun:
            return ""
        for number, (before, after) in enumerate(zip(self._begun, now, strict=False)):
            for key in sorted(before.keys() & after.keys()):
                if before[key] != after[key]:
                    return _IN_STEP.format(key, number, before[key], after[key])
        return ""  # a further group, which `AsGiven` looks at

    def _now(self) -> list[dict[str, Any]]:
        before, self._read = self._read, {}  # what a script has replaced is kept no longer
        return [
            {
                key: self._value(value, before) if isinstance(value, Tensor) else value
                for key, value in group.items()
                if key != "params" and (isinstance(value, Tensor) or _plain(value))
            }
            for group in self._optimizer.param_groups
        ]

    def _value(
        self, option: Tensor, before: Mapping[int, tuple[Tensor, int, float]]
    ) -> float | None:
        if option.numel() != 1:
            return None
        # Read only when it has changed: the host waits for its device.
        _, version, known = before.get(id(option), (option, -1, 0.0))
        if version != option._version:
            known = float(option)
        self._read[id(option)] = option, option._version, known
        return known
