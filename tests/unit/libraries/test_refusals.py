"""What a plug-in cannot keep is refused at the start, with the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, TensorDataset

from zero_contract.errors import ConfigError, ZeroError

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs, when they are imported


def data() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.zeros(8, 2)), 2)


def test_an_accelerator_that_counts_one_process_of_several_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("accelerate")
    from zero_libraries.accelerate import check_processes

    monkeypatch.setenv("WORLD_SIZE", "2")
    check_processes(2)
    with pytest.raises(ConfigError, match=r"counts 1 process, and there are 2: .*backend='gloo'"):
        check_processes(1)


def test_an_accelerator_that_accumulates_by_itself_is_refused() -> None:
    accelerate = pytest.importorskip("accelerate")
    from zero_libraries.accelerate import protect

    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ConfigError, match=r"gradient_accumulation_steps=3\): leave it out"):
        protect(
            accelerate.Accelerator(cpu=True, gradient_accumulation_steps=3),
            model,
            optimizer,
            data(),
            microbatches=2,
        )


def test_an_accelerator_that_was_to_shard_and_does_not_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("accelerate")
    from zero_libraries.accelerate import hand_over

    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    on_cpus: Any = SimpleNamespace(distributed_type="MULTI_CPU", num_processes=2)
    with pytest.raises(ConfigError, match="accelerate has dropped fsdp_plugin"):
        hand_over(on_cpus, on_cpus)


@pytest.mark.parametrize(
    ("argument", "remedy"),
    [
        ({"gradient_accumulation_steps": 3}, "microbatches is the number of micro-batches"),
        ({"auto_find_batch_size": True}, "changes the micro-batch"),
        ({"enable_jit_checkpoint": True}, "a protected Trainer leaves with a checkpoint"),
        ({"include_num_input_tokens_seen": True}, "counts padding"),
    ],
)
def test_an_argument_of_a_trainer_that_cannot_be_kept_is_refused(
    tmp_path: Path, argument: dict[str, Any], remedy: str
) -> None:
    transformers = pytest.importorskip("transformers")
    from zero_libraries.transformers import protect

    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to=[], **argument
    )
    trainer = transformers.Trainer(nn.Linear(2, 1), arguments)
    [name] = argument
    with pytest.raises(ConfigError, match=f"{name}.*{remedy}"):
        protect(trainer, microbatches=2)


def test_a_trainer_that_has_trained_says_so_whatever_train_is_given(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from zero_libraries.transformers import protect

    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    trainer = transformers.Trainer(nn.Linear(2, 1), arguments)
    protect(trainer, microbatches=2)
    trainer.run = None
    with pytest.raises(ConfigError, match="a protected Trainer trains once"):
        trainer.train(ignore_keys_for_eval=["logits"])


def test_rewards_of_a_group_are_compared_on_one_rank() -> None:
    pytest.importorskip("transformers")
    from zero_libraries.transformers import whole_groups

    class RepeatSampler(torch.utils.data.Sampler[int]):
        """As TRL's; each prompt stands several times."""

        mini_repeat_count, repeat_count, shuffle = 2, 1, False

        def __len__(self) -> int:
            return 8

    def loader(size: int) -> DataLoader[Any]:
        return DataLoader(range(4), size, sampler=RepeatSampler(), collate_fn=list)  # type: ignore[arg-type]

    whole = whole_groups(loader(4))
    assert [*whole] == [[0, 0, 1, 1], [2, 2, 3, 3]]
    assert whole.drop_last  # ranks gather equally many rewards
    loads = {
        "num_workers": 1, "worker_init_fn": print, "prefetch_factor": 3, "timeout": 9.0,
        "persistent_workers": True, "multiprocessing_context": "spawn",
    }  # fmt: skip
    loads_so = whole_groups(DataLoader(range(4), 4, sampler=RepeatSampler(), **loads))  # type: ignore[arg-type]
    kept = {name: getattr(loads_so, name) for name in loads if name != "multiprocessing_context"}
    assert kept == {name: loads[name] for name in kept}
    assert loads_so.multiprocessing_context.get_start_method() == "spawn"
    assert (plain := data()) is whole_groups(plain)
    with pytest.raises(ConfigError, match="a group of completions must be in one micro-batch"):
        whole_groups(loader(3))
    RepeatSampler.repeat_count = 2
    with pytest.raises(ConfigError, match=r"GRPOConfig\(steps_per_generation=1\)"):
        whole_groups(loader(4))


class Prompts(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


def test_prompts_that_a_stream_repeats_by_the_number_of_ranks_are_refused() -> None:
    pytest.importorskip("transformers")
    from zero_libraries.transformers import whole_groups

    stream = DataLoader(Prompts(), 4)
    assert whole_groups(stream) is stream
    with pytest.raises(ConfigError, match=r"train_dataset is a stream, .*: give a Dataset"):
        whole_groups(stream, generations=2)


def _scheduler(kind: str) -> Any:
    """What a module's configure_optimizers gives to Lightning."""
    types = pytest.importorskip("lightning.pytorch.utilities.types")
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters())
    scheduler = getattr(torch.optim.lr_scheduler, kind)(optimizer)
    plateau = kind == "ReduceLROnPlateau"
    return types.LRSchedulerConfig(scheduler, reduce_on_plateau=plateau, monitor="loss")


def _lightning(tmp_path: Path, **argument: Any) -> Any:
    lightning = pytest.importorskip("lightning")
    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, default_root_dir=str(tmp_path),
        enable_checkpointing=False, enable_progress_bar=False, **argument,
    )  # fmt: skip
    trainer.strategy.connect(lightning.LightningModule())
    return trainer


@pytest.mark.parametrize(
    ("argument", "manual", "remedy"),
    [
        ({"accumulate_grad_batches": 2}, False, "microbatches takes its place"),
        ({"reload_dataloaders_every_n_epochs": 1}, False, "one DataLoader for all epochs"),
        ({"limit_train_batches": 1}, False, r"limit_train_batches: .*give Trainer\(max_steps=n\)"),
        ({"limit_train_batches": 0.5}, False, r"limit_train_batches: .*Subset\(dataset, range"),
        ({"overfit_batches": 2}, False, r"overfit_batches: .*Subset\(dataset, range"),
        ({}, True, r"call zero_torch\.protect\(\) in the module"),
    ],
)
def test_an_argument_of_lightning_that_cannot_be_kept_is_refused(
    tmp_path: Path, argument: dict[str, Any], manual: bool, remedy: str
) -> None:
    from zero_libraries.lightning import check

    trainer = _lightning(tmp_path, **argument)
    trainer.lightning_module.automatic_optimization = not manual
    with pytest.raises(ConfigError, match=remedy):
        check(trainer)


def test_a_fast_dev_run_of_lightning_is_a_run_of_its_steps(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    from zero_libraries.lightning import check

    check(_lightning(tmp_path, fast_dev_run=2))


@pytest.mark.parametrize(
    ("schedulers", "remedy"),
    [
        (["LinearLR", "ConstantLR"], r"one scheduler, such as .*ChainedScheduler"),
        (["ReduceLROnPlateau"], r"ReduceLROnPlateau: Lightning leaves out its step"),
    ],
)
def test_a_schedule_of_lightning_that_would_change_with_a_resume_is_refused(
    tmp_path: Path, schedulers: list[str], remedy: str
) -> None:
    pytest.importorskip("lightning")
    from zero_libraries.lightning import check

    trainer = _lightning(tmp_path)
    trainer.strategy.lr_scheduler_configs = [_scheduler(kind) for kind in schedulers]
    with pytest.raises(ConfigError, match=remedy):
        check(trainer)


@pytest.mark.parametrize(
    ("kind", "given", "remedy"),
    [
        ("WeightAveraging", {}, r"stateful="),
        ("EMAWeightAveraging", {}, r"stateful="),
        ("StochasticWeightAveraging", {"swa_lrs": 0.1}, r"stateful="),
        ("GradientAccumulationScheduler", {"scheduling": {1: 2}}, "microbatches"),
    ],
)
def test_a_callback_of_lightning_whose_state_is_not_kept_is_refused(
    tmp_path: Path, kind: str, given: dict[str, Any], remedy: str
) -> None:
    callbacks = pytest.importorskip("lightning.pytorch.callbacks")
    from zero_libraries.lightning import check

    derived = type("Mine", (getattr(callbacks, kind),), {})
    trainer = _lightning(tmp_path, callbacks=[derived(**given)])
    with pytest.raises(ConfigError, match=f"{kind}.*{remedy}"):
        check(trainer)


def test_a_run_of_lightning_resumes_from_no_checkpoint_but_its_own(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    from zero_libraries.lightning import ZeroDDP

    strategy = ZeroDDP(tmp_path, microbatches=2)
    with pytest.raises(ConfigError, match=r"ckpt_path='last.ckpt'\): a run resumes by itself"):
        strategy.load_checkpoint("last.ckpt")


def test_the_samples_of_a_stream_are_not_drawn_before_the_optimizer_is_there() -> None:
    from zero_libraries.steps import GlobalBatches

    batches = GlobalBatches(data(), 3)
    assert len(batches) == 2  # of 6 samples and of 2
    with pytest.raises(ZeroError, match="before the library has made the optimizer"):
        next(iter(batches))


def test_the_steps_of_an_epoch_of_batches_are_counted_in_batches() -> None:
    from zero_libraries.steps import GlobalBatches

    samples = TensorDataset(torch.zeros(20, 2))
    batches = BatchSampler(range(20), 2, drop_last=False)
    loader = DataLoader(samples, batch_sampler=batches)
    assert len(GlobalBatches(loader, 3)) == 4  # 10 batches


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("parallelism.tensor_parallel_degree", 2, "divides a micro-batch among ranks"),
        ("parallelism.context_parallel_degree", 2, "divides a micro-batch among ranks"),
        ("parallelism.pipeline_parallel_degree", 2, "divides a micro-batch among ranks"),
        ("parallelism.expert_parallel_degree", 2, "divides a micro-batch among ranks"),
        ("training.global_batch_size", -1, "give the samples of a step"),
        ("training.global_batch_size", 7, "is no multiple of local_batch_size=2"),
        ("optimizer.implementation", "fused_opt_states_bf16", "give 'foreach'"),
        ("checkpoint.load_step", 3, "a run resumes by itself"),
        ("checkpoint.create_seed_checkpoint", True, "make the seed checkpoint by the config"),
    ],
)
def test_a_field_of_torchtitan_that_cannot_be_kept_is_refused(
    titan: Any, field: str, value: Any, remedy: str
) -> None:
    from zero_libraries.torchtitan import check

    config = titan()
    check(config)
    section, _, name = field.partition(".")
    setattr(getattr(config, section), name, value)
    with pytest.raises(ConfigError, match=rf"{field}={value!r}[ :].*{remedy}"):
        check(config)


@pytest.mark.parametrize("name", ["train_step", "batch_generator", "_forward_backward_body"])
def test_a_trainer_of_torchtitan_with_a_step_of_its_own_is_refused(titan: Any, name: str) -> None:
    from torchtitan.trainer import Trainer

    from zero_libraries.torchtitan import protect

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    body = {"Config": Config, name: lambda *_: None, "__module__": __name__}
    type("Mine", (Trainer,), body)
    given = Config(**{each.name: getattr(titan(), each.name) for each in fields(Trainer.Config)})
    with pytest.raises(ConfigError, match=rf"Mine\.{name}\(\) takes the place of torchtitan's"):
        protect(given)


@pytest.fixture
def titan() -> Any:
    """Makes a config of torchtitan's debug model that is taken."""
    pytest.importorskip("torchtitan")
    import tests.support.torchtitan_cpu  # noqa: F401 - the CPU comes first

    # isort: split
    from torchtitan.models.llama3 import config_registry

    def make() -> Any:
        config = config_registry.llama3_debugmodel()
        config.training.local_batch_size, config.training.global_batch_size = 2, 8
        return config

    return make
