"""Cases of PyTorch's launcher: what they give to `torch.distributed.run` is run by `zero-agent`.

A case that mocks the number of GPUs in its own process has an agent that finds as many: this file
is then the agent's program.
"""

import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

import torch.distributed.run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

_USAGE, _FAILED = 2, 91


def main(args=None):
    """Run an agent to its end, with the errors of torchrun; its output is this process's."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    agent = [__file__, str(gpus)] if gpus else ["-m", "zero_agent"]
    command = [sys.executable, *agent, *args]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    sys.stdout.write(ended.stdout)
    sys.stderr.write(ended.stderr)
    if ended.returncode == _USAGE:
        raise ValueError(ended.stderr)
    if ended.returncode == _FAILED:
        raise ChildFailedError("zero-agent", {0: ProcessFailure(0, 0, 1, "")})
    if ended.returncode:
        raise RuntimeError(f"zero-agent ended with {ended.returncode}")


def _on_a_machine_with(gpus):
    from zero_agent.command import resolve
    from zero_agent.node import health_checks

    with tempfile.TemporaryDirectory() as devices:
        (Path(devices) / "nvidia0").touch()
        resolve.DEVICES = Path(devices)
        resolve._count_gpus = health_checks._count_gpus = lambda: gpus
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        runpy.run_module("zero_agent", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _on_a_machine_with(int(sys.argv.pop(1)))
else:
    torch.distributed.run.main = main
