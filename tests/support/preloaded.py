"""What every rank of a `WorldPool` needs, imported once by the process that forks them."""

import gc

gc.disable()  # collections would be a fifth of the time; a rank turns them on

import hypothesis  # noqa: E402, F401
import pytest  # noqa: E402, F401
import torch._dynamo  # noqa: E402, F401

import zero_deepspeed  # noqa: E402, F401
import zero_torch  # noqa: E402, F401
