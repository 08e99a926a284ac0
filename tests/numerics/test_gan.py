"""Two engines whose losses meet, as in a GAN: one's backward goes through the other's model.

Written as DeepSpeed's example is: two losses of the discriminator before its step, and the
generator's loss through it without `requires_grad_(False)`.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zero_deepspeed
from tests.support.training import config, divided, make_engine
from tests.support.world import WorldError, WorldPool
from zero_engine.core.engine import Engine


class Mlp(nn.Module):
    def __init__(self, outputs: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, outputs))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


def gan_parts() -> tuple[Mlp, Mlp]:
    return Mlp(4, seed=1), Mlp(1, seed=2)


def judged(scores: Tensor, real: bool) -> Tensor:
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, float(real)))


def gan_data(step: int) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(step)
    return torch.rand(4, 4, generator=numbers), torch.randn(4, 4, generator=numbers)


def backward(engine: Engine, loss: Tensor, plain: bool) -> None:
    loss.backward() if plain else engine.backward(loss)


def train_gan(stage: int, frozen: bool = False, plain: bool = False) -> list[Tensor]:
    parts = gan_parts()
    settings = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 4 // dist.get_world_size(),
        "gradient_clipping": 0,
        "zero_optimization": divided(stage),
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    generator, judge = (zero_deepspeed.initialize(model=part, config=settings)[0] for part in parts)
    for step in range(3):
        real, noise = (each.chunk(judge.world_size)[judge.global_rank] for each in gan_data(step))
        # The example calls the judge's module, not its engine, and clears the gradients there.
        (judge if plain else judge.module).zero_grad()
        backward(judge, judged(judge.module(real), True), plain)
        fake = generator(noise)
        backward(judge, judged(judge.module(fake.detach()), False), plain)
        judge.step()
        judge.module.requires_grad_(not frozen)
        backward(generator, judged(judge.module(fake), True), plain)  # through the judge
        judge.module.requires_grad_(True)
        generator.step()
    return [
        *generator.get_fp32_state_dict().values(),
        *judge.get_fp32_state_dict().values(),
        *([] if plain else [torch.tensor(judge.mean_loss)]),  # its losses nobody has seen
    ]


def train_gan_in_plain_torch() -> list[Tensor]:
    generator, judge = gan_parts()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (generator, judge)]
    loss = torch.zeros(())
    for step in range(3):
        real, noise = gan_data(step)
        fake = generator(noise)
        loss = judged(judge(real), True) + judged(judge(fake.detach()), False)
        judge.zero_grad()
        loss.backward()
        optimizers[1].step()
        generator.zero_grad()
        judged(judge(fake), True).backward()
        optimizers[0].step()
    return [*generator.state_dict().values(), *judge.state_dict().values(), loss.detach()]


def train_gans() -> list[list[Tensor]]:
    others = [train_gan(2, frozen=True), train_gan(1, plain=True), train_gan(3, plain=True)]
    return [*(train_gan(stage) for stage in range(4)), *others]


@pytest.mark.parametrize("world", [1, 2])
def test_a_gan_with_two_losses_a_step_trains_as_in_plain_torch_at_every_stage(
    worlds: WorldPool, world: int
) -> None:
    (plain,) = worlds.run(1, train_gan_in_plain_torch)
    for by_stage in worlds.run(world, train_gans):
        for ours in by_stage:
            assert all(torch.equal(*pair) for pair in zip(ours, by_stage[0], strict=False))
            for mine, theirs in zip(ours, plain, strict=False):
                torch.testing.assert_close(mine, theirs)


# ---- random numbers ----


class Noisy(Mlp):
    def forward(self, inputs: Tensor) -> Tensor:
        return F.dropout(super().forward(inputs))


def train_on_the_judges_batches(every: int) -> list[str]:
    """Each batch draws noise, and the generator is trained in every second step of the judge."""
    settings = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    numbers = torch.Generator().manual_seed(0)
    judge, _, loader, _ = zero_deepspeed.initialize(
        model=Mlp(1, seed=2), training_data=torch.randn(48, 4, generator=numbers), config=settings
    )
    generator, *_ = zero_deepspeed.initialize(model=Noisy(4, seed=1), config=settings)
    for real in loader:
        with torch.no_grad():
            fake = generator(torch.randn(2, 4))
        between = torch.lerp(fake, real, torch.rand(2, 1))
        judge.backward(judge(real).mean() - judge(fake).mean() + judge(between).square().mean())
        if judge.global_steps % every == every - 1:
            generator.backward(-judge.module(generator(torch.randn(2, 4))).mean())
            generator.step()
        judge.step()
    return [judge.weight_hash(), generator.weight_hash()]


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.corners(every=[2])
def test_a_generator_that_is_trained_in_some_steps_draws_the_same_at_every_world_size(
    worlds: WorldPool, every: int
) -> None:
    (alone,) = worlds.run(1, train_on_the_judges_batches, every)
    for world in (2, 4):
        assert worlds.run(world, train_on_the_judges_batches, every) == [alone] * world


# ---- several losses of one micro-batch ----


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("batches", r"backward\(\) of another batch before the step\(\) of the last one"),
        ("tokens", r"backward\(\) twice before step\(\), with another number of tokens"),
    ],
)
def test_what_is_no_further_loss_of_the_batch_is_an_error(
    worlds: WorldPool, how: str, message: str
) -> None:
    with pytest.raises(WorldError, match=message):
        worlds.run(1, further_loss, how)


def further_loss(how: str) -> None:
    engine = make_engine(config(1))
    batches = iter(engine.training_dataloader)
    batch = next(batches)
    engine.backward(engine(batch))
    again = engine(next(batches) if how == "batches" else batch)
    engine.backward(again, tokens=3 if how == "tokens" else None)


def test_a_backward_that_failed_in_one_engine_takes_no_gradients_from_another(
    worlds: WorldPool,
) -> None:
    worlds.run(1, plain_backward_beside_a_failed_one)


def plain_backward_beside_a_failed_one() -> None:
    failed, engine = make_engine(config(1)), make_engine(config(1))
    for each in (failed, engine):
        loss = each(next(iter(each.training_dataloader)))
        if each is failed:
            each.module.embed.weight.register_hook(fail)
            with pytest.raises(ZeroDivisionError):
                each.scale(loss).backward()
        else:
            loss.backward()
            engine.step()
            assert engine.micro_steps == 1


def fail(gradient: Tensor) -> None:
    raise ZeroDivisionError
