"""A worker of `in_memory.py`: trains a GPT and notes what each step and its checkpoint took.

    in_memory_worker.py DIRECTORY CONFIG STEPS WIDTH LAYERS EVERY

Steps are noted as `time step world step_s stall_s memcpy_s rank` in a file of this process. The
memcpy is the floor of the stall: this rank's bytes, copied once to memory that is there already,
right after the step.
"""

import os
import sys
import time
from pathlib import Path

import torch
from inside import persistence_of
from training_model import GPT, Shape

import zero_deepspeed

directory = Path(sys.argv[1])
steps, width, layers, every = (int(word) for word in sys.argv[3:])
shape = Shape(width=width, layers=layers, length=64, vocabulary=4096, micro=2)


class Tokens(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __len__(self) -> int:
        return 12 * steps

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        seed = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, shape.vocabulary, (shape.length + 1,), generator=seed)
        return tokens[:-1], tokens[1:]


torch.manual_seed(0)
engine, _, loader, _ = zero_deepspeed.initialize(
    model=GPT(shape), training_data=Tokens(), config=sys.argv[2]
)
keep = persistence_of(engine).keep_in_memory
stalls_s = [0.0]


def timed_keep() -> None:
    begin = time.perf_counter()
    keep()
    stalls_s.append(time.perf_counter() - begin)


persistence_of(engine).keep_in_memory = timed_keep
engine.load_checkpoint(directory / "checkpoints")
begin = time.perf_counter()
with (directory / "steps" / f"{time.time_ns()}-{os.getpid()}").open("a", buffering=1) as notes:
    source = target = None
    for batch in loader:
        engine.backward(engine(*batch))
        at_boundary = engine.is_gradient_accumulation_boundary()
        engine.step()
        if not at_boundary:
            continue
        if engine.global_steps % every == 0:
            engine.save_checkpoint(directory / "checkpoints")
        step_s = time.perf_counter() - begin
        if source is None:
            pieces = engine._state.capture({"weight_hash": None}, {}).pieces
            own_bytes = sum(piece.data.nbytes for piece in pieces)
            source = torch.ones(own_bytes, dtype=torch.uint8)
            target = torch.zeros(own_bytes, dtype=torch.uint8)
        before = time.perf_counter()
        target.copy_(source)
        memcpy_s = time.perf_counter() - before
        notes.write(
            f"{time.time()} {engine.global_steps} {engine.world_size} {step_s} {stalls_s[-1]} "
            f"{memcpy_s} {engine.global_rank}\n"
        )
        begin = time.perf_counter()
