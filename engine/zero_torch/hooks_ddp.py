"""DDP: the ordered reduction in the place of its all-reduce, as its communication hook.

Must always hold: a sum belongs to a parameter, never to a bucket, because DDP distributes the
parameters over other buckets after the first backward, in the middle of a step. A rank owns the
same interval of each parameter, whatever bucket that is in.

Annotations are evaluated here: DDP compares those of its hook with its own types.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from zero_comm.collectives import Collectives, wait
from zero_torch.ordered_gradients import Interval, OrderedGradients


class _Buckets:
    """The state of the hook."""

    def __init__(
        self,
        names: Mapping[Tensor, str],
        gradients: OrderedGradients,
        collectives: Collectives,
    ) -> None:
        self.names = names
        self._gradients = gradients
        self._collectives = collectives

    def reduce(self, buffer: Tensor, parameters: list[tuple[str, int]]) -> None:
        """Reduce consecutive gradients in place."""
        world = self._collectives.world
        intervals = [Interval(name, -(-numel // world)) for name, numel in parameters]
        widths = [interval.numel for interval in intervals]
        each = buffer.split([numel for _, numel in parameters])
        rows = buffer.new_zeros(world, sum(widths))
        for gradient, columns in zip(each, rows.split(widths, dim=1), strict=True):
            _scatter(gradient, columns)
        full = torch.zeros_like(rows)
        self._gradients.reduce(intervals, rows.view(-1), self._collectives.own(full.view(-1)))
        assert self._gradients.now is not None
        if not self._gradients.now.last:
            buffer.zero_()
            return
        wait(self._collectives.all_gather(full.view(-1), f"sums of {intervals[0].name}"))
        for gradient, columns in zip(each, full.split(widths, dim=1), strict=True):
            gradient.copy_(columns.reshape(-1)[: gradient.numel()])


def _scatter(gradient: Tensor, rows: Tensor) -> None:
    """Put a flat gradient into rows [world, n], one after the other; what is left stays zero."""
    whole, rest = divmod(gradient.numel(), rows.shape[1])
    rows[:whole].copy_(gradient[: whole * rows.shape[1]].view(whole, -1))
    if rest:
        rows[whole, :rest].copy_(gradient[whole * rows.shape[1] :])


def _reduce(buckets: _Buckets, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    buffer = bucket.buffer()
    buckets.reduce(buffer, [(buckets.names[p], p.numel()) for p in bucket.parameters()])
    devices: list[int | str | torch.device] = [buffer.device] if buffer.is_cuda else []
    done: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices or None)
    done.set_result(buffer)
    return done


def attach(
    model: DistributedDataParallel,
    trained: Mapping[str, nn.Parameter],
    gradients: OrderedGradients,
    collectives: Collectives,
) -> None:
    """Let DDP reduce the gradients of the trained parameters through `gradients`."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in trained.items()}
    model.register_comm_hook(_Buckets(names, gradients, collectives), _reduce)
