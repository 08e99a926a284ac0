"""DDP: the ordered reduction in the place of its all-reduce, as its communication hook.

Must always hold: where DDP may distribute the parameters over other buckets in the middle of a
step, which it does after its first backward, a sum belongs to a parameter, never to a bucket. A
rank owns one part of each sum; what is left because the parts are equal, less than one element for
each rank, is summed by all ranks.

DDP reads a bucket after the end of the backward's exchanges, because its own end is announced
later; but not in the first backward of a static graph, in which it reads the buckets right after
the hook of the last one. There each exchange ends in the hook.

Buckets are few and large, so between two of them what has ended is gone on with at the gradient of
each parameter: what a bucket comes to then travels between nodes, not only when the next is full.

Annotations are evaluated here: DDP compares those of its hook with its own types.
"""

import weakref
from collections.abc import Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from zero_comm.exchange.collectives import Collectives
from zero_comm.sums.reduction import Turn
from zero_contract.errors import ZeroError
from zero_torch.ordered_gradients import OrderedGradients, as_real, check_taken

DEPTH = 8
"""Buckets that may have come to the same exchange. Their gradients lie where DDP has them anyway,
and where the network has as much to do, it will not be idle while a hook waits."""


class _Buckets:
    """What the hook does."""

    def __init__(
        self,
        model: DistributedDataParallel,
        names: Mapping[Tensor, str],
        gradients: OrderedGradients,
        collectives: Collectives,
    ) -> None:
        self._model = model
        self._names = names
        self.gradients = gradients
        self._collectives = collectives
        self._now: Turn | None = None
        self._settled = False
        """Whether a step has ended, and so the buckets stay what they are."""
        self._summed: list[tuple[Tensor, Tensor]] = []
        """Each parameter of the last micro-step, and its part of a bucket."""
        self._rests: dict[str, Tensor] = {}
        """The rest of this backward's gradients."""
        self._kept: dict[str, list[Tensor]] = {}
        """The rests of the micro-steps before, which have not travelled."""
        self._is_first = True
        """Whether no backward has ended."""
        self._came: set[Tensor] = set()
        """The parameters that DDP has reduced in this backward."""
        self._has_last = False
        """Whether the last bucket is among those of this backward."""
        gradients.settles.append(self._reduce_rests)
        gradients.ends.append(self._end_backward)

    def reduce(self, bucket: dist.GradBucket) -> None:
        """Begin to reduce the gradients of a bucket in place."""
        now, before = self.gradients.now, self._now
        if now is not before:
            self._settled = self._settled or (before is not None and before.last)
            self._now = now
        buffer, parameters = as_real(bucket.buffer()), bucket.parameters()
        self._came.update(parameters)
        self._has_last |= bucket.is_last()
        names = [self._names[parameter] for parameter in parameters]
        each = buffer.split([as_real(p.detach()[None]).numel() for p in parameters])
        if now is not None and now.last:
            self._summed += zip(parameters, each, strict=True)
        # Until a step has ended DDP may make other buckets: a sum is of a parameter then.
        # In a step of one micro-step no other bucket can have the same sum.
        if self._settled or (now is not None and now.first and now.last):
            self._reduce(f"the bucket of {names[0]}", buffer)
        else:
            for name, gradient in zip(names, each, strict=True):
                self._reduce(name, gradient)
        if self._at_once:
            self._reduce_rests()

    @property
    def _at_once(self) -> bool:
        """Whether DDP reads the buckets before the end of this backward."""
        return self._is_first and bool(self._model.static_graph)

    def _reduce(self, name: str, gradient: Tensor) -> None:
        if self.gradients.is_native:
            self.gradients.reduce(name, gradient, gradient, now=self._at_once)
            return
        world = self._collectives.world
        whole = gradient.numel() // world * world
        self._rests[name] = gradient[whole:]
        if whole:  # fewer elements than ranks are all rest
            divided = gradient[:whole]
            own = self._collectives.own(divided)
            share = partial(self._collectives.all_gather, divided, f"sums of {name}")
            self.gradients.reduce(name, divided, own, then=share, now=self._at_once)

    def _end_backward(self) -> None:
        # DDP decides when it is made which parameters it reduces, and without
        # `find_unused_parameters` it ends no backward in which one of them got no gradient: then
        # it would leave local gradients behind, without an error.
        if self._model.require_backward_grad_sync:
            trained = self.gradients.trained
            absent = [name for name, each in trained.items() if each not in self._came]
            complete, self._has_last = self._has_last and not absent, False
            self._came.clear()
            if not complete:
                what = absent[0] if absent else "parameters that are frozen or not used"
                raise ZeroError(
                    f"DistributedDataParallel has not reduced {what}: it decides when it is made "
                    "which parameters it reduces, and waits for the gradient of each of them; wrap "
                    "the model after the last change of requires_grad, call the wrapped model, "
                    "outside of no_sync(), and not its .module, and give "
                    "find_unused_parameters=True if layers are frozen afterwards, or not used by "
                    "every micro-batch"
                )
        self._reduce_rests()
        self._is_first = False
        for parameter, total in self._summed:
            # DDP leaves a parameter without gradient that no rank has used in this micro-step,
            # although others of the step have. One that is frozen gets none.
            if parameter.grad is None and parameter.requires_grad:
                of_pairs = (
                    torch.view_as_complex(total.view(-1, 2)) if parameter.is_complex() else total
                )
                parameter.grad = of_pairs.view(parameter.shape).clone()
        self._summed.clear()

    def _reduce_rests(self) -> None:
        """Sum the rests, weighted and added as all that is reduced in parts is."""
        # In an order that all ranks have.
        every = {name: rest for name, rest in sorted(self._rests.items()) if rest.numel()}
        self._rests.clear()
        gradients = self.gradients
        for dtype in dict.fromkeys(rest.dtype for rest in every.values()):
            rests = {name: rest for name, rest in every.items() if rest.dtype == dtype}
            widths, mine = [rest.numel() for rest in rests.values()], torch.cat([*rests.values()])
            gradients.pipeline.weigh(mine)
            for name, each in zip(rests, mine.split(widths), strict=True):
                turn = gradients.receive(f"the end of {name}")
                kept = [] if turn.first else self._kept.get(name, [])
                self._kept[name] = [*kept, each]
            # They travel where the sums do: if there is a plan, all of a step at its end.
            if turn.withholds:
                continue
            # A peer may still wait in its hook for an exchange that this rank has to begin.
            gradients.pipeline.complete()
            sent = torch.cat([torch.stack(self._kept.pop(name)) for name in rests], dim=1)
            rows = self._collectives.everybodys(sent, "the ends of gradients")
            everybodys = rows.view(-1, *sent.shape).transpose(0, 1).split(widths, dim=2)
            for (name, rest), each in zip(rests.items(), everybodys, strict=True):
                total = gradients.add(f"the end of {name}", each)
                if total is not None:
                    rest.copy_(total)


class _State:
    """The state of the hook, which DDP's reducer has."""

    def __init__(self, buckets: _Buckets) -> None:
        # The garbage collector does not see what a reducer has, parameters and their hooks among
        # it: with more than weak references no run would ever be freed, nor the threads of its
        # group.
        self.buckets = weakref.ref(buckets)

    def __reduce__(self) -> tuple[object, ...]:
        """A copy of the model, or a file with it, has the reducer of DDP and nothing of this."""
        return type(None), ()


def _reduce(state: _State, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    buckets, buffer = state.buckets(), bucket.buffer()
    if buckets is None:
        raise ZeroError(
            "the run that sums the gradients of this model is gone: keep what zero_torch.protect() "
            "has returned, or wrap the module anew"
        )
    # Done before the sum is: DDP reads the buffer behind the end of the exchanges.
    devices: list[int | str | torch.device] = [buffer.device] if buffer.is_cuda else []
    done: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices or None)
    try:
        buckets.reduce(bucket)
    except Exception as error:  # DDP would make another one of it
        buckets.gradients.hold(error)
    done.set_result(buffer)
    return done


def attach(
    model: DistributedDataParallel,
    parameters: Mapping[str, nn.Parameter],
    gradients: OrderedGradients,
    collectives: Collectives,
) -> list[RemovableHandle]:
    """Let DDP reduce the gradients of all trained parameters through `gradients`."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in parameters.items()}
    buckets = _Buckets(model, names, gradients, collectives)  # which `gradients` keeps
    model.register_comm_hook(_State(buckets), _reduce)
    model.broadcast_buffers = False  # all ranks have the same ones, see `ForwardWrites`

    of_run = weakref.ref(gradients)

    # A hook of the script that returns something has put that in the place of the parameter.
    def arrive(name: str, parameter: Tensor, _: object) -> None:
        if (gradients := of_run()) is None:
            return
        try:
            check_taken(name, parameter)
            gradients.arrive()
        except ZeroError as error:  # DDP must end a backward that it has begun
            gradients.hold(error)
        gradients.poll()

    return [
        parameter.register_post_accumulate_grad_hook(partial(arrive, name, parameter))
        for name, parameter in gradients.trained.items()
    ]
