"""What a script may use with zero_torch: prefetching, torch.compile, a GradScaler, meta devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import zero_torch
from tests.numerics.test_stock_torch import MICROBATCHES, batches, dataset, protected, trained
from tests.support.stock import GPT, make
from tests.support.world import WorldPool
from zero_contract.errors import ZeroError

pytestmark = pytest.mark.full


def run_of(model: Any, **options: Any) -> tuple[Any, zero_torch.Run]:
    """An optimizer and a run of a model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    loader = DataLoader(dataset(), batch_size=2, shuffle=True)
    run = zero_torch.protect(model, optimizer, loader, microbatches=MICROBATCHES, **options)
    return optimizer, run


def prefetched(wrapper: str, reshard: bool | int) -> str:
    """FSDP2's explicit prefetching, of everything before everything."""
    model = make(wrapper, reshard_after_forward=reshard)
    modules = [each for each in model.modules() if isinstance(each, FSDPModule)]
    for number, module in enumerate(modules):
        module.set_modules_to_forward_prefetch(modules[number + 1 :])
        module.set_modules_to_backward_prefetch(modules[:number])
    _, run = run_of(model)
    for tokens in batches(run):
        run.backward(model(tokens))
        run.step()
    return run.weight_hash()


@pytest.mark.parametrize(
    ("wrapper", "reshard"), [("fsdp2", True), ("fsdp2", 2), ("fsdp2", False), ("hsdp", True)]
)
def test_prefetching_changes_no_bit(worlds: WorldPool, wrapper: str, reshard: bool | int) -> None:
    (expected, *_) = worlds.run(1, trained, "plain")
    assert worlds.run(4, prefetched, wrapper, reshard) == [expected[0]] * 4


def compiled(wrapper: str) -> str:
    """With the graphs of torch.compile, and the kernels of eager mode."""
    buckets = {"bucket_cap_mb": 25} if wrapper == "ddp" else {}
    model: Any = make(wrapper, **buckets)
    if wrapper == "fsdp2":
        for block in model.blocks:
            block.compile(backend="aot_eager")
    else:
        model = torch.compile(model, backend="aot_eager")
    _, run = run_of(model)
    for tokens in batches(run):
        run.backward(model(tokens))
        run.step()
    torch.compiler.reset()
    return run.weight_hash()


def test_compiled_models_have_one_hash_at_every_world_size(worlds: WorldPool) -> None:
    runs = [("plain", 1), ("ddp", 2), ("fsdp2", 1), ("fsdp2", 3)]
    found = {run: set(worlds.run(run[1], compiled, run[0])) for run in runs}
    assert len(set().union(*found.values())) == 1, found


def scaled(wrapper: str, directory: str, until: int, scale: float | None) -> tuple[str, float]:
    """A loop of the script's own, with its own scaler; from the newest checkpoint on."""
    model = make(wrapper)
    scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
    optimizer, run = run_of(model, scaler=scaler)
    run.load(directory)
    for tokens in batches(run, until):
        if scaler is None:
            model(tokens).backward()
            run.clip_grad_norm_(0.5)
            optimizer.step()
        else:
            scaler.scale(model(tokens)).backward()
            run.clip_grad_norm_(0.5)
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    run.save(directory)
    run.close()
    return run.weight_hash(), 0.0 if scaler is None else scaler.get_scale()


def test_a_scaler_of_the_scripts_own_is_held_and_resumes(worlds: WorldPool, tmp_path: Path) -> None:
    """A scale of a power of two changes no bit."""
    (expected,) = worlds.run(1, scaled, "plain", str(tmp_path / "unscaled"), 4, None)
    worlds.run(3, scaled, "fsdp2", str(tmp_path / "scaled"), 2, 1024.0)
    found = worlds.run(2, scaled, "ddp", str(tmp_path / "scaled"), 4, 2.0)
    assert found == [(expected[0], 1024.0)] * 2


def saved(directory: str) -> str:
    model, _, run = protected("ddp")
    for tokens in batches(run, 2):
        run.backward(model(tokens))
        run.step()
    run.save(directory)
    run.close()
    return run.weight_hash()


def initialized_on_meta(directory: str) -> str:
    with torch.device("meta"):
        model = GPT()
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    model.to_empty(device="cpu")
    _, run = run_of(model)
    run.load(directory)
    return run.weight_hash()


def test_a_model_that_was_initialized_on_the_meta_device_loads(
    worlds: WorldPool, tmp_path: Path
) -> None:
    (expected, _) = worlds.run(2, saved, str(tmp_path))
    assert worlds.run(3, initialized_on_meta, str(tmp_path)) == [expected] * 3


def within_no_sync() -> str:
    model: Any = DistributedDataParallel(nn.Linear(9, 1))
    _, run = run_of(model)

    def train() -> None:
        for tokens in batches(run):
            with model.no_sync():
                run.backward(model(tokens.float()).sum())
                run.step()

    return refusal(train)


def not_taken() -> str:
    model: Any = make("plain")
    _, run = run_of(model)

    def train() -> None:
        for tokens in batches(run):
            run.backward(model(tokens))

    return refusal(train)


def refusal(train: Any) -> str:
    with pytest.raises(ZeroError) as raised:
        train()
    return str(raised.value)


def test_a_step_that_is_not_reduced_or_not_taken_is_an_error_that_names_it(
    worlds: WorldPool,
) -> None:
    (told,) = worlds.run(1, not_taken)
    assert told.startswith("the step was not taken: call run.step(), or optimizer.step()")
    for told in worlds.run(2, within_no_sync):
        assert told.startswith("no gradient was reduced in this micro-step")
        assert "not within no_sync()" in told


def failed_half_way(directory: str, fails: bool, own: bool) -> str:
    """A backward fails when some gradients of its micro-batch have come; the script goes on."""
    model: Any = make("plain")
    _, run = run_of(model)
    run.save(directory)

    def backward(tokens: Any) -> None:
        model(tokens).backward() if own else run.backward(model(tokens))

    def fail(_: Any) -> None:
        raise ZeroDivisionError

    for tokens in batches(run):
        if fails:
            handle = model.embed.weight.register_hook(fail)
            with pytest.raises(ZeroDivisionError):
                backward(tokens)
            handle.remove()
            assert "failed half way" in refusal(lambda each=tokens: backward(each))
            run.load(directory)
            fails = False
            continue
        backward(tokens)
        run.step()
    return run.weight_hash()


@pytest.mark.parametrize("own", [True, False])
def test_a_backward_that_fails_half_way_leaves_nothing_in_its_step(
    worlds: WorldPool, tmp_path: Path, own: bool
) -> None:
    expected = worlds.run(1, failed_half_way, str(tmp_path / "whole"), False, own)
    assert worlds.run(1, failed_half_way, str(tmp_path / "failed"), True, own) == expected


def unscaled_by_the_script(clips: bool) -> str:
    """The usual order with a scaler: unscale, clip, step, update."""
    model = make("plain")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    loader = DataLoader(dataset(), batch_size=2, shuffle=True)
    run = zero_torch.protect(model, optimizer, loader, microbatches=5, scaler=scaler)
    for tokens in batches(run):
        scaler.scale(model(tokens)).backward()
        if clips:
            scaler.unscale_(optimizer)
        run.clip_grad_norm_(0.5)
        scaler.step(optimizer)
        scaler.update()
    return run.weight_hash()


def test_gradients_that_the_script_has_unscaled_are_clipped(worlds: WorldPool) -> None:
    assert worlds.run(1, unscaled_by_the_script, True) == worlds.run(
        1, unscaled_by_the_script, False
    )


def accumulated_by_accelerate(wrapper: str) -> str:
    """A loop that leaves gradients on the rank, and calls no step for them."""
    model: Any = make(wrapper)
    _, run = run_of(model)

    def train() -> None:
        for tokens in batches(run):
            if wrapper == "ddp":
                with model.no_sync():
                    model(tokens).backward()
            else:
                model.set_requires_gradient_sync(False)
                model(tokens).backward()

    return refusal(train)


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_accumulation_by_accelerate_is_refused_before_a_gradient_is_lost(
    worlds: WorldPool, wrapper: str
) -> None:
    for told in worlds.run(2, accumulated_by_accelerate, wrapper):
        assert "accelerator.accumulate() is a no_sync() with gradient_accumulation_steps" in told
        assert "self.manual_backward(loss)" in told


def test_tensor_parallelism_with_a_loader_is_refused(worlds: WorldPool) -> None:
    with pytest.raises(AssertionError, match=r"ConfigError: .* lies on a mesh of shape"):
        worlds.run(4, trained, "tensor")
