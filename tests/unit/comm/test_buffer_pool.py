"""Buffers are used again, and never by two streams at once."""

from __future__ import annotations

import torch

from zero_comm.sums.buffer_pool import BufferPool

CPU = torch.device("cpu")


def test_a_buffer_is_used_again_on_the_stream_on_which_it_was_given_back() -> None:
    now = "main"
    pool = BufferPool(CPU, stream=lambda: now)
    first = pool.take(8, torch.float32)
    pool.give(first)
    now = "of a branch of the model"
    other = pool.take(8, torch.float32)
    assert other is not first
    now = "main"
    assert pool.take(8, torch.float32) is first
    pool.give(other)  # its last reader was here
    assert pool.take(8, torch.float32) is other


def test_sizes_and_dtypes_are_not_mixed_up_and_idle_memory_is_freed() -> None:
    pool = BufferPool(CPU)
    one = pool.take(8, torch.float32)
    pool.give(one)
    assert pool.take(8, torch.bfloat16) is not one
    assert pool.take(4, torch.float32) is not one
    pool.free()
    assert pool.take(8, torch.float32) is not one
