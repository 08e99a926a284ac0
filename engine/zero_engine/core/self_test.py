"""A self-test at the start of a run: the first micro-batch is run twice, with the same bits.

Owns the replay and its comparison. Must always hold: weights, buffers, optimizer and position stay
as they are, and the gradients of a replay are in no sum of a step; all ranks replay together, since
weights are gathered and gradients reduced as in a micro-step.

A script may compute its loss outside of the module, so a replay differentiates the sum of what
forward returns. If bits differ, two more forwards find the first module whose output does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from zero_comm.determinism import Deterministic
from zero_comm.exchange.objects import gather_objects
from zero_comm.sums.reduction import Turn
from zero_contract.errors import ZeroError
from zero_engine.optim.zero_optimizer import ZeroOptimizer
from zero_engine.parts import Core, Run
from zero_engine.sharding.flat_unit import overlap
from zero_step.bit_sum import bit_sum

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Replay:
    """The bits of one replay."""

    outputs: tuple[int, ...]
    """Of what forward has returned."""
    gradients: Mapping[str, int]
    """By parameter, of this rank's share of the sum of its gradients."""


class SelfTest:
    """The self-test of one engine; `run_if_due` before each forward in training."""

    def __init__(self, core: Core, run: Run) -> None:
        self._core = core
        self._run = run
        self._due = core.zero is not None and core.hardware.mode.replays(core.device)

    def run_if_due(
        self,
        forward: Callable[[tuple[Any, ...], Mapping[str, Any]], Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        seed: int,
    ) -> None:
        """Replay a micro-batch if a run begins, or resumes on other hardware. Collective.

        Raises:
            ZeroError: The bits differ, and elastic.deterministic is "error".
        """
        if not self._due or not torch.is_grad_enabled():
            return
        self._due = False
        zero, run = self._core.zero, self._run
        begins = run.cursor.step == 0 or run.hardware_changed
        live = run.plan().live(0, run.world)
        if zero is None or zero.accumulating or run.cursor.micro or not begins or live < 1:
            return

        def call() -> Any:
            torch.manual_seed(seed)
            own_args, own_kwargs = tree_map(_copied, (args, dict(kwargs)))
            return forward(own_args, own_kwargs)

        first, second = self._replay(zero, call, live), self._replay(zero, call, live)
        self._judge(call, first, second)

    def _replay(self, zero: ZeroOptimizer, call: Callable[[], Any], live: int) -> Replay:
        """Forward and backward of the micro-batch, whose gradients the next micro-step drops."""
        core = self._core
        assert core.reducer is not None
        with _buffers_kept(core.module), core.reducer.phase.aside():
            outputs = _tensors(call())
            sums = [each for each in outputs if each.requires_grad]
            if sums:
                core.coordinator.begin_backward()
                core.reducer.begin(Turn(live=live, first=True, last=True))
                torch.autograd.backward(sums, [torch.ones_like(each) for each in sums])
                with core.guard():
                    core.coordinator.end_gathers()
                    core.reducer.finish()
                core.coordinator.end_backward()
                for each in zero.sums:
                    each.settle()
            return Replay(
                outputs=tuple(int(bit_sum(each)) for each in outputs),
                gradients=dict(_gradients(zero)) if sums else {},
            )

    def _judge(self, call: Callable[[], Any], first: Replay, second: Replay) -> None:
        """Compare two replays, on all ranks; log or raise what differs."""
        core = self._core
        outputs = first.outputs != second.outputs
        gradients = [
            name for name, bits in first.gradients.items() if second.gradients[name] != bits
        ]
        differs = torch.tensor([int(outputs or bool(gradients))], device="cpu")
        if not core.collectives.everybodys(differs, "whether a replay has the same bits").any():
            return
        by_rank = self._gathered([outputs, gradients], "what differs in a replay")
        modules = self._gathered(self._first_module(call), "the module that differs first")
        if any(modules) or any(each[0] for each in by_rank):
            problem = output_differs(modules)
        else:
            order = [name for name, _ in core.module.named_parameters()]
            problem = gradients_differ([each[1] for each in by_rank], order)
        text = (
            f"the first micro-batch has other bits when it is run again: {problem}. A kernel does "
            "not repeat itself, or the module keeps state that is not a buffer; "
            f"{remedy(core.hardware.mode)}"
        )
        if core.hardware.mode is Deterministic.ERROR:
            raise ZeroError(text)
        if self._run.rank == 0:
            _log.warning("%s", text)

    def _gathered(self, own: Any, what: str) -> list[Any]:
        return gather_objects(own, what, self._core.collectives.everybodys)

    def _first_module(self, call: Callable[[], Any]) -> tuple[int, str] | None:
        """The first module whose output differs between two more forwards: its turn and name."""
        seen: list[tuple[str, list[int]]] = []

        def look(name: str, _module: nn.Module, _args: Any, output: Any) -> None:
            seen.append((name, [int(bit_sum(each)) for each in _tensors(output)]))

        module = self._core.module
        hooks = [
            each.register_forward_hook(partial(look, name)) for name, each in module.named_modules()
        ]
        try:
            for _ in range(2):
                with _buffers_kept(module):
                    call()
        finally:
            for hook in hooks:
                hook.remove()
        half = len(seen) // 2
        pairs = enumerate(zip(seen[:half], seen[half:], strict=False))
        return next(((turn, old[0]) for turn, (old, new) in pairs if old != new), None)


def remedy(mode: Deterministic) -> str:
    """What to do about it: on a GPU torch's attention repeats itself if torch may refuse others."""
    if mode is Deterministic.WARN:
        return (
            'if the model uses scaled_dot_product_attention, set elastic.deterministic to "error", '
            'without which its backward does not repeat itself on a GPU; "off" ends this test; see '
            "docs/determinism.md"
        )
    return 'see docs/determinism.md, or set elastic.deterministic to "off"'


def output_differs(by_rank: Sequence[Sequence[Any] | None]) -> str:
    """What forward computes differs: the first module, in the order in which modules have ended."""
    found = [(each[0], rank, each[1]) for rank, each in enumerate(by_rank) if each is not None]
    if not found:
        return "the output of forward differs, though not in two more forwards"
    _, rank, name = min(found)
    where = f"module {name!r}" if name else "the whole module, and of none inside it,"
    return f"the output of {where} differs first, on rank {rank}"


def gradients_differ(by_rank: Sequence[Sequence[str]], order: Sequence[str]) -> str:
    """Gradients differ: how many, and of these the first that backward makes."""
    differing = {name for names in by_rank for name in names}
    first = next(name for name in reversed(order) if name in differing)
    return (
        f"outputs are equal, and {len(differing)} gradients differ, in the order of backward first "
        f"that of {first!r}"
    )


def _gradients(zero: ZeroOptimizer) -> Iterator[tuple[str, int]]:
    """The bits of this rank's share of each gradient sum."""
    for unit, total in zip(zero.units, zero.totals, strict=True):
        low, high = unit.interval
        for slot in unit.layout.slots:
            start, stop = overlap(low, high, slot.start, slot.stop)
            if start < stop:
                yield slot.fqn, int(bit_sum(total[start - low : stop - low]))


def _tensors(structure: Any) -> list[Tensor]:
    leaves = (leaf for leaf in tree_leaves(structure) if isinstance(leaf, Tensor))
    return [leaf for leaf in leaves if leaf.numel()]


def _copied(value: Any) -> Any:
    """A copy of a tensor: a backward must not go on into the graph that it comes from."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


@contextmanager
def _buffers_kept(module: nn.Module) -> Iterator[None]:
    """A context that ends with the buffers as they were."""
    before = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        for buffer, kept in before:
            buffer.data.copy_(kept)  # through `data`: autograd need not notice
