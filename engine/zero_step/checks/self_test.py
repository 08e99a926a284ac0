"""A self-test at the start of a run: the first micro-batch is run twice, with the same bits.

Owns when it is due, and the comparison; whoever shards the model runs the micro-batch (`Replay`).
Must always hold: weights, buffers, optimizer and position stay as they are, and the gradients of a
replay are in no sum of a step; all ranks replay together, since weights are gathered.

A script may compute its loss outside of the module, so a replay differentiates the sum of what
forward returns.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from zero_comm.determinism import Deterministic
from zero_comm.exchange.collectives import Collectives
from zero_comm.exchange.objects import gather_objects
from zero_contract.errors import ZeroError
from zero_data.global_batch import Cursor
from zero_step.checks.bit_sum import bit_sum

_log = logging.getLogger(__name__)


class Gradient(NamedTuple):
    """The bits of one gradient, or of those that are reduced together."""

    turn: int
    """In the order of backward, the same on all ranks."""
    name: str
    bits: int


@dataclass(frozen=True, kw_only=True)
class Replay:
    """The bits of one replay."""

    outputs: tuple[int, ...]
    """Of what forward has returned."""
    gradients: Sequence[Gradient]


@dataclass(kw_only=True)
class SelfTest:
    """The self-test of one training; `run_if_due` before each forward in training."""

    module: nn.Module
    """The one whose parts are named, as the script has made it."""
    mode: Deterministic
    collectives: Collectives
    device: torch.device
    cursor: Cursor
    hardware_changed: Callable[[], bool]
    """Whether the checkpoint that was loaded was made on other hardware."""
    replay: Callable[[Callable[[], Any]], Replay]
    """Runs a forward and its backward, whose gradients are in no sum. Collective."""
    _due: bool = field(init=False)

    def __post_init__(self) -> None:
        self._due = self.mode.replays(self.device)

    def run_if_due(
        self,
        call: Callable[[tuple[Any, ...], Mapping[str, Any]], Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        seed: Callable[[], None],
    ) -> None:
        """Replay a micro-batch if a run begins, or resumes on other hardware. Collective.

        `call` is the module's forward; `seed` gives random numbers the same beginning each time.

        Raises:
            ZeroError: The bits differ, and elastic.deterministic is "error".
        """
        if not self._due or not torch.is_grad_enabled():
            return
        self._due = False
        if self.cursor.micro or not (self.cursor.step == 0 or self.hardware_changed()):
            return

        def forward() -> Any:
            seed()
            return call(*tree_map(_copied, (args, dict(kwargs))))

        replays = []
        for _ in range(2):
            with _buffers_kept(self.module):
                replays.append(self.replay(forward))
            torch.clear_autocast_cache()  # as at the begin of a micro-step
        self._judge(forward, *replays)

    def _judge(self, forward: Callable[[], Any], first: Replay, second: Replay) -> None:
        """Compare two replays, on all ranks; log or raise what differs."""
        outputs = first.outputs != second.outputs
        pairs = zip_longest(first.gradients, second.gradients)  # a part may be left out at random
        gradients = [(old or new)[:2] for old, new in pairs if old != new]
        differs = torch.tensor([int(outputs or bool(gradients))], device="cpu")
        if not self.collectives.everybodys(differs, "whether a replay has the same bits").any():
            return
        # All ranks come here, also those whose own bits are equal: two more forwards find the first
        # module whose output differs, and gather weights.
        by_rank = self._gathered([outputs, gradients], "what differs in a replay")
        modules = self._gathered(self._first_module(forward), "the module that differs first")
        if any(modules) or any(each[0] for each in by_rank):
            problem = output_differs(modules)
        else:
            problem = gradients_differ([each[1] for each in by_rank])
        text = (
            f"the first micro-batch has other bits when it is run again: {problem}. A kernel does "
            "not repeat itself, or the module keeps state that is not a buffer; "
            f"{remedy(self.mode)}"
        )
        if self.mode is Deterministic.ERROR:
            raise ZeroError(text)
        if self.collectives.rank == 0:
            _log.warning("%s", text)

    def _gathered(self, own: Any, what: str) -> list[Any]:
        return gather_objects(own, what, self.collectives.everybodys)

    def _first_module(self, forward: Callable[[], Any]) -> tuple[int, str] | None:
        """The first module whose output differs between two more forwards: its turn and name."""
        seen: list[tuple[str, tuple[int, ...]]] = []

        def look(name: str, _module: nn.Module, _args: Any, output: Any) -> None:
            seen.append((name, bits_of(output)))

        module = self.module
        hooks = [
            each.register_forward_hook(partial(look, name)) for name, each in module.named_modules()
        ]
        try:
            for _ in range(2):
                with _buffers_kept(module):
                    forward()
        finally:
            for hook in hooks:
                hook.remove()
        # A part may be left out at random: then the pairs differ from there on.
        half = len(seen) // 2
        pairs = enumerate(zip(seen[:half], seen[half:], strict=False))
        return next(((turn, old[0]) for turn, (old, new) in pairs if old != new), None)


def remedy(mode: Deterministic) -> str:
    """The remedy: on a GPU torch's attention repeats itself if torch may refuse other kernels."""
    if mode is Deterministic.WARN:
        return (
            'if the model uses scaled_dot_product_attention, set elastic.deterministic to "error", '
            'without which its backward does not repeat itself on a GPU; "off" ends this test; see '
            "docs/determinism.md"
        )
    return 'see docs/determinism.md, or set elastic.deterministic to "off"'


def output_differs(by_rank: Sequence[Sequence[Any] | None]) -> str:
    """The first module whose output differs, in the order in which modules have ended, in words."""
    found = [(each[0], rank, each[1]) for rank, each in enumerate(by_rank) if each is not None]
    if not found:
        return "the output of forward differs, though not in two more forwards"
    _, rank, name = min(found)
    where = f"module {name!r}" if name else "the whole module, and of none inside it,"
    return f"the output of {where} differs first, on rank {rank}"


def gradients_differ(by_rank: Sequence[Sequence[tuple[int, str]]]) -> str:
    """The number of gradients that differ, and the first that backward makes, in words."""
    found = {(turn, name) for gradients in by_rank for turn, name in gradients}
    return (
        f"outputs are equal, and {len(found)} gradients differ, in the order of backward first "
        f"that of {min(found)[1]!r}"
    )


def bits_of(outputs: Any) -> tuple[int, ...]:
    """The bits of what a forward has returned."""
    return tuple(int(bit_sum(each)) for each in tensors_of(outputs))


def roots_of(outputs: Any) -> list[Tensor]:
    """The outputs of a forward with which its backward begins; there may be none."""
    return [each for each in tensors_of(outputs) if each.requires_grad]


def differentiate(roots: Sequence[Tensor]) -> None:
    """Run the backward of the sum of all their elements."""
    torch.autograd.backward(roots, [torch.ones_like(each) for each in roots])


def tensors_of(structure: Any) -> list[Tensor]:
    """The tensors in a structure that have elements."""
    leaves = (leaf for leaf in tree_leaves(structure) if isinstance(leaf, Tensor))
    return [leaf for leaf in leaves if leaf.numel()]


def _copied(value: Any) -> Any:
    # A backward must not go on into the graph that a tensor comes from, and a forward may write to
    # its arguments.
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


@contextmanager
def _buffers_kept(module: nn.Module) -> Iterator[None]:
    """A context that ends with the buffers as they were."""
    before = [(each, dict(each._buffers)) for each in module.modules()]
    copies = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        for buffer, kept in copies:
            buffer.data.copy_(kept)  # through `data`: autograd need not notice
        for owner, buffers in before:  # a forward may have replaced them
            owner._buffers.update(buffers)
