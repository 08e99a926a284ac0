"""Listings and commands of docs/from-*.md run as they stand: one result at any number of ranks."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cluster import ROOT, agent, environment
from tests.support.network import own_loopback

pytestmark = [pytest.mark.processes, pytest.mark.full]

DATA = """
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

torch.manual_seed(0)
epochs = 2


class Rows(Dataset):
    def __len__(self):
        return 101

    def __getitem__(self, number):
        return torch.randn(8, generator=torch.Generator().manual_seed(number))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))

    def forward(self, batch):
        return (self.layers(batch)[:, 0] - batch.sum(1)).square().mean()


dataset, model = Rows(), Net()
loader = DataLoader(dataset, 4, shuffle=True)
"""
TRAINED = """
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
"""
TORCH = """
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

dist.init_process_group("gloo")
policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
"""
TRAINER = """
from functools import partial

import transformers
from transformers import Trainer
from transformers.trainer_utils import get_last_checkpoint

TrainingArguments = partial(transformers.TrainingArguments, use_cpu=True, report_to=[])


class Named(Rows):
    def __getitem__(self, number):
        return {"batch": super().__getitem__(number)}


class WithLoss(Net):
    def forward(self, batch):
        return {"loss": super().forward(batch)}


dataset, model = Named(), WithLoss()
"""
ACCELERATE = """
import accelerate

def Accelerator(**more):
    return accelerate.Accelerator(cpu=True, **more)
"""
LIGHTNING = """
from functools import partial

import lightning

lightning.Trainer = partial(
    lightning.Trainer,
    accelerator="cpu",
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    logger=False,
    enable_progress_bar=False,
)


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, batch, _):
        return self.net(batch)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


module = Module()
"""
GIVEN = {
    "ddp": DATA + TRAINED + TORCH,
    "fsdp2": DATA + TORCH,
    "trainer": DATA + TRAINER,
    "accelerate": DATA + TRAINED + ACCELERATE,
    "lightning": DATA + LIGHTNING,
}
"""What a page assumes of a script, on CPUs."""
NEEDS = {page: page for page in GIVEN} | {
    "ddp": "torch", "fsdp2": "torch", "trainer": "transformers",
}  # fmt: skip
"""The package of each."""
TORCHTITAN = """
from pathlib import Path

from tests.support.torchtitan_job import small
from torchtitan.models.llama3 import config_registry

config_registry.llama3_8b = lambda: small(Path.cwd())
"""
"""What llama3_8b is on a CPU."""
CPU_FIRST = """
import sys
from importlib.abc import MetaPathFinder


class CpuFirst(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torchtitan.trainer":
            sys.meta_path.remove(self)
            import tests.support.torchtitan_cpu


sys.meta_path.insert(0, CpuFirst())
"""
"""A sitecustomize, by which torchtitan's Trainer finds a CPU wherever it is imported."""
PRINTED = re.compile(r"^(\d+ v\d+:[0-9a-f]+)$", re.MULTILINE)
"""The step and the hash of the weights."""


def listings(page: str) -> tuple[str, str]:
    """The script before and after."""
    text = (ROOT / "docs" / f"from-{page}.md").read_text()
    before, after = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    if page == "fsdp2":  # whose model and optimizer are made as before
        after = before[: before.index("for epoch")] + after
    if page == "accelerate":  # the body of whose loop stays
        body = re.search(r"accumulate\(model\):\n(.*)", before, re.DOTALL)
        assert body
        after = re.sub(r" +\.\.\.  # as before\n", body[1], after)
    return before, after


def typed(page: str) -> list[str]:
    """The command of a page, typed on HOST."""
    text = (ROOT / "docs" / f"from-{page}.md").read_text()
    [command] = re.findall(r"```\n(zero-agent .*?)```", text, re.DOTALL)
    return shlex.split(command.replace("\\\n", " ").replace("HOST", "localhost"))


def at_home(directory: Path, command: list[str], **variables: str) -> str:
    """What a command prints that is typed in a directory, by a user whose home that is."""
    bin_directory = os.path.dirname(sys.executable)
    variables = {
        "PATH": f"{bin_directory}:{os.environ['PATH']}",
        "HOME": str(directory),
    } | variables
    with own_loopback(29400) as before:
        done = subprocess.run(
            [*before, *command],
            cwd=directory,
            env=environment() | variables,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def trained(directory: Path, script: str, ranks: int) -> set[str]:
    directory.mkdir(exist_ok=True)
    (directory / "train.py").write_text(script)
    started = ("--standalone", f"--nproc-per-node={ranks}", "--max-restarts=10", "train.py")
    done = agent(*started, cwd=directory, timeout=300)
    assert done.returncode == 0, done.stderr
    found = set(PRINTED.findall(done.stdout))
    assert found, done.stdout
    return found


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", GIVEN)
def test_what_a_page_changes_in_a_script_gives_it_one_result_and_a_resume(
    tmp_path: Path, page: str
) -> None:
    pytest.importorskip(NEEDS[page])
    script = GIVEN[page] + listings(page)[1]
    (one,) = trained(tmp_path / "one", script, 1)
    (tmp_path / "eight").mkdir()
    (tmp_path / "eight" / "train.py").write_text(script)
    assert set(PRINTED.findall(at_home(tmp_path / "eight", typed(page)))) == {one}
    assert trained(tmp_path / "eight", script, 2) == {one}  # resumed at the end


@pytest.mark.timeout(1200)
def test_the_command_of_torchtitan_trains_and_resumes(tmp_path: Path) -> None:
    pytest.importorskip("torchtitan")
    text = (ROOT / "docs" / "from-torchtitan.md").read_text()
    [listing] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "my_configs.py").write_text(TORCHTITAN + listing)
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "sitecustomize.py").write_text(CPU_FIRST)
    variables = {"PYTHONPATH": f"{tmp_path / 'cpu'}:{ROOT}", "HF_HUB_OFFLINE": "1"}

    def steps(until: int) -> set[str]:
        said = at_home(tmp_path, [*typed("torchtitan"), f"--training.steps={until}"], **variables)
        return set(re.findall(r"step: +(\d+) .*loss:", said))

    assert steps(3) == {"1", "2", "3"}
    assert steps(4) == {"4"}


@pytest.mark.parametrize("page", GIVEN)
def test_the_script_before_is_one_that_torchrun_runs(tmp_path: Path, page: str) -> None:
    pytest.importorskip(NEEDS[page])
    (tmp_path / "train.py").write_text(GIVEN[page] + listings(page)[0])
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = subprocess.run(
        [*launcher, "train.py"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
