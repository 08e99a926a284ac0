"""The host waits for the device once in a step: whatever reads a number before has to wait, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.numerics.test_stock_torch import batches, protected
from tests.support.training import config, make_engine
from tests.support.world import WorldPool
from zero_comm.exchange.collectives import Collectives

DTYPES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4}},
}


class Reads(TorchDispatchMode):
    """Notes where the host reads a number of a tensor: on a device it would wait there."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.events.append("a read")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.corners(dtype=["bf16"])
@pytest.mark.parametrize("counted", [False, True])
def test_a_step_waits_for_the_device_once_and_reads_nothing_before(
    worlds: WorldPool, dtype: str, counted: bool
) -> None:
    """Also if the script counts the tokens on the device, in each micro-step."""
    assert worlds.run(2, watch_steps, dtype, counted) == [[("the wait", 1)] * 3] * 2


def watch_steps(dtype: str, counted: bool) -> list[tuple[str, int]]:
    """Of a step at three stages: what came first, a read or a wait; and the number of waits.

    Not of the first step, at whose end the hosts compare the order of the modules at stage 3.
    """
    events: list[str] = []
    wait = Collectives.to_host

    def noted(self: Collectives, *args: Any) -> Any:
        events.append("the wait")
        return wait(self, *args)

    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Collectives, "to_host", noted)
        for stage in (0, 2, 3):
            engine = make_engine(config(stage, **DTYPES[dtype]))
            assert engine.training_dataloader is not None
            for batch in engine.training_dataloader:
                with Reads(events):
                    tokens = (batch >= 0).sum() if counted else None
                    engine.backward(engine(batch), tokens=tokens)
                    before = engine.global_steps
                    engine.step()
                if engine.global_steps > before:
                    seen = (events[0], events.count("the wait"))
                    events.clear()
                if engine.global_steps == 2:
                    found.append(seen)
                    break
    return found


def watch_stock_steps(wrapper: str, max_norm: float | None, tensor_rate: bool) -> list[int]:
    """Of each micro-step of the second step: how often the host reads a number of its model."""
    model, optimizer, run = protected(wrapper)
    if tensor_rate:
        for group in optimizer.param_groups:
            group.update(lr=torch.tensor(group["lr"]), foreach=False)
    events: list[str] = []
    found = []
    for tokens in batches(run, 2):
        before = run.global_step
        with Reads(events):
            run.backward(model(tokens))
            last = run.step(max_norm)
        if before == 1 and not last:
            found.append(len(events))
        events.clear()
    return found


@pytest.mark.parametrize("wrapper", ["plain", "ddp", "fsdp2"])
@pytest.mark.parametrize(("max_norm", "tensor_rate"), [(None, False), (1.0, True)])
@pytest.mark.corners(wrapper=["fsdp2"])
def test_a_stock_script_waits_for_no_device_before_the_last_micro_batch_of_a_step(
    worlds: WorldPool, wrapper: str, max_norm: float | None, tensor_rate: bool
) -> None:
    """Not even for the loss, or for a learning rate that is a tensor and has not changed."""
    for reads in worlds.run(
        1 if wrapper == "plain" else 2, watch_stock_steps, wrapper, max_norm, tensor_rate
    ):
        assert reads
        assert not any(reads)
