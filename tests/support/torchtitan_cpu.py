"""torchtitan on a CPU: what it insists on CUDA for, each with what stands in its place.

To be imported before the rest of torchtitan, which keeps what it has imported.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask
from torchtitan.tools import utils


def _nothing(*_: Any, **__: Any) -> None:
    """In the place of what a CPU has not."""


def _attention(q: Tensor, k: Tensor, v: Tensor, *, block_mask: Any, **more: Any) -> Any:
    mask = create_mask(block_mask.mask_mod, len(q), 1, q.size(2), k.size(2), device="cpu")
    chosen = {name: more[name] for name in ("scale", "enable_gqa")}
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, **chosen), None


utils.device_type = "cpu"  # where torch has no accelerator, it takes "cuda"
utils.device_module = SimpleNamespace(  # torch.cpu has no name and no statistics of memory
    set_device=_nothing,
    current_device=lambda: 0,
    synchronize=_nothing,
    empty_cache=_nothing,
    reset_peak_memory_stats=_nothing,
    memory_stats=lambda _: {},
    get_device_name=lambda _: "CPU",
    get_device_properties=lambda _: SimpleNamespace(total_memory=1 << 30),
)

from torchtitan.distributed import utils as groups  # noqa: E402
from torchtitan.models.common.attention import FlexAttention  # noqa: E402

groups.set_pg_timeouts = _nothing  # gloo takes no device in a barrier, and no other timeout
FlexAttention._compiled_flex_attn = _attention  # "does not support backward on CPU"
torch.set_num_threads(1)
