"""DeepSpeed's `deepspeed.zero.TiledLinear`: a linear layer as a grid of small ones.

At stage 3 each of them is gathered by itself, so that no rank holds the whole matrix. Source:
deepspeed.runtime.zero.tiling.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from zero_contract.errors import ConfigError
from zero_engine.parameters.gather import GatheredParameters

__all__ = ["TiledLinear"]


class TiledLinear(nn.Module):
    """`linear_cls(in_features, out_features)`, cut into `out_splits` times `in_splits` layers."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Callable[..., nn.Module] = nn.Linear,
        init_linear: nn.Linear | None = None,
        **kwargs: Any,
    ) -> None:
        """Make the layers.

        Args:
            in_features: The width of the input.
            out_features: The width of the output.
            bias: Whether there is a bias.
            in_splits: The number of parts of the input.
            out_splits: The number of parts of the output.
            input_is_already_split: The input is a list of its parts.
            combine_out_splits: The output is one tensor, not a list of its parts.
            linear_cls: The class of the layers.
            init_linear: A layer whose weights are copied.
            kwargs: Further arguments of `linear_cls`.

        Raises:
            RuntimeError: There are no parts, or more of them than features.
        """
        super().__init__()
        if not 1 <= in_splits <= in_features or not 1 <= out_splits <= out_features:
            raise RuntimeError(
                f"TiledLinear: in_splits {in_splits} and out_splits {out_splits} must be from 1 to "
                f"the {in_features} and {out_features} features"
            )
        self.in_features, self.out_features = in_features, out_features
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split = input_is_already_split
        self.combine_out_splits = combine_out_splits
        self.in_parts = _bounds(in_features, in_splits)
        self.out_parts = _bounds(out_features, out_splits)
        last = in_splits - 1  # of a sum of parts one adds the bias
        self.linears = nn.ModuleList(
            nn.ModuleList(
                linear_cls(stop - start, high - low, bias=bias and row == last, **kwargs)
                for row, (start, stop) in enumerate(pairwise(self.in_parts))
            )
            for low, high in pairwise(self.out_parts)
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Any) -> Any:
        """The output of the whole layer, or its parts."""
        parts = input_
        if not self.input_is_already_split:
            parts = [input_[..., start:stop] for start, stop in pairwise(self.in_parts)]
        outputs = []
        for column in self.linears:
            assert isinstance(column, nn.ModuleList)
            output = column[0](parts[0])
            for linear, part in zip(list(column)[1:], parts[1:], strict=True):
                output = output + linear(part)
            outputs.append(output)
        return torch.cat(outputs, dim=-1) if self.combine_out_splits else outputs

    @torch.no_grad()
    def copy_params_from(self, other: nn.Linear) -> None:
        """Copy the weights of a layer of the same size; every rank calls it."""
        bias: Tensor | None = other.bias
        if tuple(other.weight.shape) != (self.out_features, self.in_features):
            raise ConfigError(
                f"TiledLinear: the layer to copy has a weight of {tuple(other.weight.shape)}, this "
                f"one of {(self.out_features, self.in_features)}"
            )
        params = [*other.parameters(), *self.parameters()]
        # What rank 0 writes is what all ranks get: at stage 3 a rank has a part of each.
        with GatheredParameters(params, modifier_rank=0):
            for column, (low, high) in zip(self.linears, pairwise(self.out_parts), strict=True):
                assert isinstance(column, nn.ModuleList)
                for linear, (start, stop) in zip(column, pairwise(self.in_parts), strict=True):
                    assert isinstance(linear, nn.Linear)
                    linear.weight.copy_(other.weight[low:high, start:stop])
                    if linear.bias is not None and bias is not None:
                        linear.bias.copy_(bias[low:high])


def _bounds(size: int, count: int) -> list[int]:
    """The bounds of `count` intervals of [0, size), of which the first may be longer by one."""
    sizes = [size // count + (index < size % count) for index in range(count)]
    return list(accumulate(sizes, initial=0))
