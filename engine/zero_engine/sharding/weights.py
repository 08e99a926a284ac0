"""The weights of a whole model, gathered from the shards.

Owns the input of the weight hash, and the plain state_dict. Must always hold: both are the
same at every world size and stage. Everything here is collective, and one unit is whole at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor, nn

from zero_checkpoint.torch_state import persistent_buffers
from zero_engine.sharding.flat_unit import FlatUnit


def whole_weights(units: Iterable[FlatUnit]) -> Iterator[tuple[str, Tensor]]:
    """Name and value of each parameter, whole, in the highest precision. Collective."""
    for unit in units:
        weights = unit.gather_highest()
        for slot in unit.layout.slots:
            yield slot.fqn, weights[slot.start : slot.stop].view(slot.shape)


def module_state_dict(
    module: nn.Module,
    units: Sequence[FlatUnit],
    aliases: Mapping[str, str],
    *,
    highest: bool = False,
) -> dict[str, Tensor]:
    """The state_dict of the module on the CPU.

    Tensors have the dtypes that the module computes in; with `highest` all floating-point tensors
    are fp32, from master weights if they are trained. Collective.
    """
    whole = {name: buffer.cpu().clone() for name, buffer in persistent_buffers(module)}
    for unit in units:
        weights = unit.gather_highest()
        for slot in unit.layout.slots:
            part = weights[slot.start : slot.stop].view(slot.shape)
            dtype = part.dtype if highest else unit.full.dtype
            whole[slot.fqn] = part.to("cpu", dtype, copy=True)
    if highest:
        whole = {n: v.float() if v.is_floating_point() else v for n, v in whole.items()}
    return whole | {other: whole[name] for other, name in aliases.items()}
