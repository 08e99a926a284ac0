"""What `zero-ctl render` makes of a job file for Slurm and systemd."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace

import pytest

from tests.deploy.job import job
from tests.deploy.manifests import DEPLOY
from zero_orchestrator.jobfile.reading import schema
from zero_orchestrator.jobfile.reading.reader import JobFileError
from zero_orchestrator.jobfile.render import RENDERERS
from zero_orchestrator.jobfile.render.files import shown, write


def test_the_batch_script_asks_for_what_the_job_needs_and_is_clean(tmp_path):
    text = shown(
        RENDERERS["slurm"](
            job(
                tmp_path,
                """\
checkpoint: {path: "/mnt/my checkpoints"}
processes_per_node: gpu
resources: {cpu: 32, memory: 256Gi, gpu: 8, shm: 64Gi}
grace_s: 240
slurm: {partition: gpu, account: team, time: "8:00:00", options: {exclusive: "", qos: high}}
environment: {NOTE: "it's"}
""",
            )
        )
    )
    options = re.findall(r"^#SBATCH --(.*)$", text, re.MULTILINE)
    assert options == [
        "job-name=gpt", "nodes=2", "ntasks-per-node=1", "cpus-per-task=32", "mem=262144M",
        "gpus-per-node=8", "time=8:00:00", "partition=gpu", "account=team", "output=%x-%j.log",
        "open-mode=append", "requeue", "no-kill", "signal=B:USR1@240", "exclusive", "qos=high",
    ]  # fmt: skip
    assert "export PET_SHUTDOWN_TIMEOUT=200\n" in text
    assert "set -- train.py '--checkpoints=/mnt/my checkpoints'\n" in text
    template = (DEPLOY / "slurm" / "zero_agent.sbatch").read_text()
    assert text.endswith(template.partition("set -euo pipefail\n")[2])
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    if shutil.which("shellcheck"):
        done = subprocess.run(
            ["shellcheck", "-"], input=text, text=True, capture_output=True, check=False
        )
        assert (done.returncode, done.stdout) == (0, "")


def test_every_machine_gets_the_unit_of_deploy_and_the_jobs_variables(tmp_path):
    more = "etcd: {endpoints: [a:2379, b:2379], ca: /ca.pem}\ncheckpoint: {path: /mnt/c}"
    files = RENDERERS["systemd"](job(tmp_path, more))
    unit = DEPLOY / "systemd" / "zero-agent@.service"
    assert files["etc/systemd/system/zero-agent@.service"] == unit.read_text()
    assert "TimeoutStopSec=120\n" in files["etc/systemd/system/zero-agent@gpt.service.d/job.conf"]
    variables = files["etc/zero-elastic/gpt.env"].splitlines()
    assert "PET_RDZV_ENDPOINT=a:2379,b:2379" in variables
    assert "PET_ETCD_CA=/ca.pem" in variables
    assert "ZERO_SCRIPT=train.py --checkpoints=/mnt/c" in variables
    written = write(files, tmp_path / "root")
    assert [str(path.relative_to(tmp_path / "root")) for path in written] == list(files)


YOURS = "etcd: {endpoints: [a:2379]}\ncheckpoint: {path: /mnt/c}\n"
LIMITS = "etc/systemd/system/zero-agent@gpt.service.d/job.conf"


@pytest.mark.parametrize(
    ("to", "limit"),
    [
        ("systemd", f"MemoryMax={32 * 2**30}\n"),
        ("slurm", "#SBATCH --mem=32768M\n"),
    ],
)
def test_the_memory_of_a_job_on_machines_is_limited_only_if_its_file_does(tmp_path, to, limit):
    text = str(RENDERERS[to](job(tmp_path, f"{YOURS}resources: {{cpu: 8}}")))
    assert limit.partition("=")[0].partition(":")[0] not in text
    asked = RENDERERS[to](job(tmp_path, f"{YOURS}resources: {{memory: 32Gi}}"))
    assert limit in (asked[LIMITS] if to == "systemd" else shown(asked))


def test_the_variables_of_a_unit_are_for_its_owner_alone_and_secrets_are_in_no_file(tmp_path):
    files = RENDERERS["systemd"](job(tmp_path, f"{YOURS}secrets: {{TOKEN: wandb/key}}"))
    assert "EnvironmentFile=/etc/zero-elastic/gpt.secrets.env\n" in files[LIMITS]
    old = tmp_path / "root/etc/zero-elastic/gpt.env"
    old.parent.mkdir(parents=True)
    old.write_text("")
    old.chmod(0o644)
    modes = {path.name: path.stat().st_mode & 0o777 for path in write(files, tmp_path / "root")}
    assert modes["gpt.env"] == 0o600
    assert modes["job.conf"] & 0o044 == 0o044
    assert "TOKEN" not in files["etc/zero-elastic/gpt.env"]


def test_a_batch_script_asks_for_its_secrets_and_does_not_have_them(tmp_path):
    one = job(tmp_path, "checkpoint: {path: /c}\nsecrets: {TOKEN: wandb/key}")
    script = shown(RENDERERS["slurm"](one))
    asked = [line for line in script.splitlines() if "TOKEN" in line]
    done = subprocess.run(["bash", "-c", asked[0]], capture_output=True, text=True, check=False)
    assert (done.returncode, "is a secret of this job" in done.stderr) == (127, True)


@pytest.mark.parametrize(
    ("to", "more", "message"),
    [
        ("slurm", "", r"job.yaml:1: checkpoint.path: is missing; set it to a directory"),
        ("systemd", "checkpoint: {path: /c}", r"etcd.endpoints: are missing; machines without"),
        (
            "systemd",
            'checkpoint: {path: "/a b"}\netcd: {endpoints: a:1}',
            r"'--checkpoints=/a b': an environment file of systemd cannot hold it",
        ),
    ],
)
def test_what_machines_need_and_a_job_file_does_not_say_is_asked_for(tmp_path, to, more, message):
    with pytest.raises(JobFileError, match=message):
        RENDERERS[to](job(tmp_path, more))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("args", word) for word in ("", " ", "a b", "a\rb", "a\nb", "it's", "a\\b")),
        *(("A", value) for value in (" a", "a ", "a\rB=1", "a\nb", "it's", "a\\b")),
    ],
)
def test_what_an_environment_file_of_systemd_cannot_hold_is_refused(tmp_path, key, value):
    more = {"args": ["--note", value]} if key == "args" else {"environment": {key: value}}
    one = job(tmp_path, YOURS)
    with pytest.raises(JobFileError, match="an environment file of systemd cannot hold it"):
        RENDERERS["systemd"](replace(one, file=replace(one.file, **more)))


@pytest.mark.parametrize("to", ["slurm", "systemd"])
def test_rendered_files_take_the_config_along_and_name_no_path_of_this_machine(tmp_path, to):
    config = '{"checkpoint": {"async": true}}'
    (tmp_path / "engine.json").write_text(config)
    more = f"{YOURS}config: engine.json\nargs: [--config=$(CONFIG)]"
    path = tmp_path / "job.yaml"
    path.write_text(f"name: gpt\nscript: train.py\nnodes: 2\n{more}\n")
    files = RENDERERS[to](schema.load(path))
    assert str(tmp_path) not in shown(files)
    if to == "systemd":
        assert files["srv/gpt/config.json"] == config
        assert "--config=/srv/gpt/config.json" in files["etc/zero-elastic/gpt.env"]
        return
    head, _, _ = shown(files).partition("readonly job=")
    done = subprocess.run(
        ["bash", "-s"], input=f'{head}echo "$@"', cwd=tmp_path, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.stdout == "train.py --config=gpt.config.json\n"
    assert (tmp_path / "gpt.config.json").read_text() == f"{config}\n"
