"""`zero-ckpt` as it is typed: outputs, exit codes, and errors of one line with the remedy."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import zero_deepspeed
from tests.support.cluster import environment
from tests.support.training import config, make_engine, train
from tests.support.waiting import wait_for
from tests.support.world import WorldPool
from zero_checkpoint import find
from zero_checkpoint.tools import cli

pytestmark = pytest.mark.processes

DEEPSPEED = Path(__file__).parents[1] / "data" / "deepspeed"
COMMAND = [sys.executable, "-m", "zero_checkpoint.tools.cli"]


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def ckpt(capsys):
    """The command in this process: importing torch for each would be most of the time."""

    def run(*arguments: object) -> Done:
        capsys.readouterr()
        try:
            code = cli.main([str(argument) for argument in arguments])
        except SystemExit as end:  # argparse
            code = int(end.code or 0)
        return Done(code, *capsys.readouterr())

    return run


@pytest.fixture
def of_json(ckpt):
    return lambda *arguments: json.loads(ckpt(*arguments, "--json").stdout)


@pytest.fixture(scope="module")
def pool():
    """A process in which engines live."""
    pool = WorldPool(1)
    yield pool
    pool.close()


def train_three(root):
    engine = make_engine(config(2))
    for step in (1, 2, 3):
        train(engine, step)
        engine.save_checkpoint(root, client_state={"epoch": step})
    return engine.weight_hash()


@pytest.fixture(scope="module")
def trained(tmp_path_factory, pool):
    """Three checkpoints of the tiny GPT, made by the engine, and the hash of the last one."""
    root = tmp_path_factory.mktemp("trained")
    return root, pool.run(1, train_three, root)[0]


@pytest.fixture
def root(trained, tmp_path):
    """A copy that a test may spoil."""
    subprocess.run(["cp", "-a", trained[0], tmp_path / "ck"], check=True)
    return tmp_path / "ck"


def test_one_looks_into_a_checkpoint_and_finds_what_the_engine_wrote(trained, ckpt, of_json):
    root, weight_hash = trained
    listed = ckpt("ls", root)
    assert listed.returncode == 0
    assert [line.split()[:2] for line in listed.stdout.splitlines()[1:]] == [
        [str(step), f"global_step{step}"] for step in (3, 2, 1)
    ]
    shown = ckpt("show", root, "--norms")
    assert shown.returncode == 0
    assert weight_hash in shown.stdout
    assert "head.weight is tied to embed.weight" in shown.stdout
    assert "in tree order, blocks of 8" in shown.stdout
    assert re.search(r"^threads per rank +\d+ *$", shown.stdout, re.MULTILINE)
    assert re.search(r"^hardware +\w.*; deterministic", shown.stdout, re.MULTILINE)

    record = of_json("show", f"{root}@global_step3")
    assert record["run"]["weight_hash"] == weight_hash
    assert record["optimizer_kinds"] == ["exp_avg", "exp_avg_sq"]
    assert [group["hyperparameters"]["lr"] for group in record["groups"]] == [1e-2, 5e-3]


def test_verify_and_diff_say_by_their_exit_code_what_they_found(root, ckpt, of_json):
    assert ckpt("verify", root, "--all").returncode == 0
    assert ckpt("diff", root, root).returncode == 0
    different = ckpt("diff", f"{root}@global_step1", root)
    assert different.returncode == 1
    assert "param/embed.weight" in different.stdout
    path = find(root).candidates[0].path / "r00000.safetensors"
    with path.open("r+b") as file:
        file.seek(10_000)
        file.write(b"\xff\x00\xff\x00")

    damaged = ckpt("verify", root)
    assert damaged.returncode == 1
    assert "r00000.safetensors, bytes 8192:12288: " in damaged.stdout
    assert "it holds param/" in damaged.stdout
    (result,) = of_json("verify", root)
    assert result["damage"][0]["problem"] == "XXH3-64 differs"
    assert ckpt("diff", root, root).returncode == 2


def test_a_damaged_manifest_is_damage_and_not_passed_over_in_silence(root, ckpt, of_json, caplog):
    newest, older, *_ = (candidate.path for candidate in find(root).candidates)
    manifest = newest / "MANIFEST.json"
    os.truncate(manifest, manifest.stat().st_size - 100)

    for flags in ((), ("--all",)):
        done = ckpt("verify", root, *flags)
        assert done.returncode == 1
        assert f"{newest}: DAMAGED in 1 places\n  MANIFEST.json, bytes 0:" in done.stdout
        assert f"{older}: intact" in done.stdout
    results = of_json("verify", root, "--all")
    assert [bool(result["damage"]) for result in results] == [True, False, False]

    shown = ckpt("show", root)
    assert shown.returncode == 0
    assert str(older) in shown.stdout
    assert f"passed over: {manifest}: does not match its own digest" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        (["ls", "{tmp}/nowhere"], "nowhere: there is no such directory", 2),
        (["ls", __file__], "this is a file; give a directory of checkpoints", 2),
        (["show", __file__], "this is a file; give a directory of checkpoints, one checkpoint", 2),
        (["ls", "{root}/{newest}"], "is one checkpoint; give the directory above", 2),
        (["show", "{tmp}"], "there is no usable checkpoint here", 2),
        (["show", "{root}@best"], "no checkpoint is tagged 'best'; tags there are: global", 2),
        (["prune", "{root}", "--keep-last=1"], "keep at least 2", 2),
        (["repair", "{root}", "--older-than=soon"], "soon is not a length of time", 2),
        (["export", "{root}", "{root}", "--to=torch"], "is there already; remove it", 2),
        (["export", "{root}", "{tmp}/o", "--to=hf"], "the directory of one with --hf-config", 2),
        (["export", "{root}", "o", "--to=hf", "--max-shard-size=5XB"], "such as 5GB", 2),
        (["export", "{root}", "o", "--to=hf", "--hf-config={tmp}"], "there is no config.json", 2),
        (["import", "{tmp}/no", "{tmp}/o", "--from=hf"], "no: there is no such file or dir", 2),
        (["import", "{tmp}", "{tmp}/o", "--from=torch"], "a directory; give the file of", 2),
        (["import", "{tmp}", __file__, "--from=torch"], "this is a file; give a directory", 2),
        (["import", "{tmp}", "{tmp}/o", "--from=dcp"], "no .metadata in it", 2),
        (["import", __file__, "{tmp}/o", "--from=deepspeed"], "this is a file; give the dir", 2),
        (["import", "{tmp}", "{tmp}/o", "--from=hf", "--key=m"], "--key is for --from torch", 2),
        (["import", "{tmp}", "{tmp}/o", "--from=torch", "--tie=a"], "write OTHER=NAME", 2),
    ],
)
def test_wrong_input_is_one_message_with_the_remedy(
    trained, tmp_path, ckpt, arguments, message, code
):
    root = trained[0]
    names = {"root": root, "tmp": tmp_path, "newest": find(root).candidates[0].path.name}
    done = ckpt(*(argument.format(**names) for argument in arguments))
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == code
    assert list(tmp_path.iterdir()) == []


def test_with_json_what_cannot_be_done_is_one_document_too(tmp_path, ckpt):
    done = ckpt("show", tmp_path, "--json")
    message = done.stderr.removeprefix("zero-ckpt: ").rstrip()
    assert "there is no usable checkpoint here" in message
    assert json.loads(done.stdout) == {"error": message, "exit_code": 2}
    assert done.returncode == 2


def test_dry_runs_change_nothing_and_then_exactly_that_happens(root, of_json):
    attempt = root / "step-000000009.g0.abcd"
    attempt.mkdir()
    os.utime(attempt, (1, 1))
    (root / "latest").unlink()
    before = sorted(root.rglob("*"))

    pruning = of_json("prune", root, "--keep-last=2", "--dry-run")
    repairing = of_json("repair", root, "--dry-run")

    assert sorted(root.rglob("*")) == before
    assert [action["what"] for action in pruning["actions"]] == ["delete"]
    assert [action["what"] for action in repairing["actions"]] == ["sweep", "write"]
    assert of_json("prune", root, "--keep-last=2")["actions"] == pruning["actions"]
    done = of_json("repair", root)["actions"]
    assert [(a["what"], a["path"]) for a in done] == [
        (a["what"], a["path"])
        for a in repairing["actions"]  # their reasons tell the age
    ]
    kept = [row["step"] for row in of_json("ls", root)]
    assert kept == [3, 2]
    assert (root / "latest").read_text().startswith("step-000000003.")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_deepspeed_run_goes_on_in_the_engine(tmp_path, stage, pool, ckpt, of_json):
    source = DEEPSPEED / f"stage{stage}"
    done = ckpt("import", source, tmp_path / "ck", "--from=deepspeed")
    assert done.returncode == 0, done.stderr
    digest = of_json("show", tmp_path / "ck")["run"]["weight_hash"]

    ((loaded, step, options),) = pool.run(1, load_deepspeed, tmp_path / "ck", stage != 2)

    assert loaded == digest
    assert step == 3
    assert options == [(1e-2, 0.1), (5e-3, 0.0)]


def load_deepspeed(root, bf16):
    """The hash, step and options of an engine that began with others."""
    model = DeepSpeedNet()
    groups = [
        {"params": [model.embed.weight], "weight_decay": 0.5},
        {"params": list(model.norm.parameters())},
    ]
    settings = config(1, bf16=bf16)
    if bf16:  # as the DeepSpeed of then kept its buffers
        settings["data_types"] = {"buffer_dtype": "bf16"}
    engine, optimizer, _, _ = zero_deepspeed.initialize(
        model=model, config=settings, model_parameters=groups
    )
    engine.load_checkpoint(root)
    options = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    return engine.weight_hash(), engine.global_steps, options


class DeepSpeedNet(torch.nn.Module):
    """The model of tests/data/deepspeed."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 5)
        self.norm = torch.nn.LayerNorm(5)
        self.frozen = torch.nn.Parameter(torch.zeros(5), requires_grad=False)
        self.head = torch.nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("offset", torch.zeros(3))


def test_imported_weights_alone_begin_with_a_fresh_optimizer(root, tmp_path, pool, ckpt, of_json):
    assert ckpt("export", root, tmp_path / "m.pt", "--to=torch").returncode == 0
    flags = ["--from=torch", "--buffer=temperature"]
    done = ckpt("import", tmp_path / "m.pt", tmp_path / "ck2", *flags)
    assert done.returncode == 0, done.stderr
    ((loaded, step, losses),) = pool.run(1, load_weights, tmp_path / "ck2")
    assert loaded == of_json("show", root)["run"]["weight_hash"]
    assert step == 0
    assert len(losses) == 1


def load_weights(root):
    """The hash and step of an engine that began with other weights; then it trains a step."""
    engine = make_engine(config(3), seed=99)
    engine.load_checkpoint(root)
    return engine.weight_hash(), engine.global_steps, train(engine, 1)


@pytest.mark.parametrize(
    ("number", "code", "told"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")],
)
@pytest.mark.corners(number=[signal.SIGINT])
def test_a_command_that_is_stopped_ends_without_a_traceback_and_leaves_nothing(
    tmp_path, number, code, told
):
    fifo = tmp_path / ".metadata"
    os.mkfifo(fifo)
    command = [*COMMAND, "import", str(tmp_path), str(tmp_path / "ck"), "--from=dcp"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment()) as process:
        try:
            writer = wait_for(lambda: opened(fifo), 150, "the command reads")
            process.send_signal(number)
            os.close(writer)  # a read that begins only now sees the end of the file
            _, errors = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == code
    assert errors == f"zero-ckpt: {told}\n"
    assert not (tmp_path / "ck").exists()


def opened(fifo):
    """A descriptor to write to a FIFO, once somebody reads from it: then they wait for us."""
    try:
        return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return None


@pytest.mark.parametrize(
    ("command", "code", "told"),
    [
        ("ls ROOT >&-", 0, ""),
        ("show ROOT --json >/dev/full", 2, "zero-ckpt: No space left on device\n"),
        ("ls ROOT >/dev/full", 2, "zero-ckpt: No space left on device\n"),
        ("ls ROOT/none 2>&-", 2, ""),
    ],
)
@pytest.mark.corners(command=["show ROOT --json >/dev/full"])
def test_whatever_becomes_of_the_output_the_exit_code_is_right(trained, command, code, told):
    script = f"{sys.executable} -c 'from zero_orchestrator.start import ckpt; ckpt()'"
    done = subprocess.run(
        ["bash", "-c", f"{script} {command.replace('ROOT', str(trained[0]))}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=environment(),
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, "", told)


@pytest.mark.parametrize("flags", [(), ("--json",)])
@pytest.mark.full
def test_a_closed_pipe_is_no_error(trained, flags):
    reader, writer = os.pipe()
    os.close(reader)
    command = [*COMMAND, "show", str(trained[0]), *flags]
    with subprocess.Popen(
        command, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment()
    ) as process:
        os.close(writer)
        assert process.communicate(timeout=120)[1] == ""
    assert process.returncode == 128 + signal.SIGPIPE
