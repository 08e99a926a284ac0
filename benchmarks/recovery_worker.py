"""A plain script for `recovery.py`: a pause and an all-reduce per step, no engine.

    recovery_worker.py DIRECTORY PEER_TIMEOUT_S STEPS PACE_S

It notes each finished step as `time step world` in a file of its own, and goes on after the
highest step that any file of the job has.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import zero_agent

directory = Path(sys.argv[1])
step = max((int(line.split()[1]) for f in directory.iterdir() for line in f.open()), default=0)
dist.init_process_group("gloo", timeout=timedelta(seconds=float(sys.argv[2])))
steps = torch.tensor(step)
dist.all_reduce(steps, op=dist.ReduceOp.MAX)
step = int(steps)
with (directory / f"{time.time_ns()}-{os.getpid()}").open("a", buffering=1) as notes:
    while step < int(sys.argv[3]):
        time.sleep(float(sys.argv[4]))
        dist.all_reduce(torch.ones(1 << 16))
        step += 1
        zero_agent.heartbeat(step)
        notes.write(f"{time.time()} {step} {dist.get_world_size()}\n")
dist.destroy_process_group()
