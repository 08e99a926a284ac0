"""Cases of PyTorch's launcher: what they give to `torch.distributed.run` is run by `zero-agent`."""

import subprocess
import sys

import torch.distributed.run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

_USAGE, _FAILED = 2, 91


def main(args=None):
    """Run an agent to its end, with the errors of torchrun; its output is this process's."""
    command = [sys.executable, "-m", "zero_agent", *args]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    sys.stdout.write(ended.stdout)
    sys.stderr.write(ended.stderr)
    if ended.returncode == _USAGE:
        raise ValueError(ended.stderr)
    if ended.returncode == _FAILED:
        raise ChildFailedError("zero-agent", {0: ProcessFailure(0, 0, 1, "")})
    if ended.returncode:
        raise RuntimeError(f"zero-agent ended with {ended.returncode}")


torch.distributed.run.main = main
