"""What the parameters of a unit show: their values, or that these are not there.

Owns the `data` of the parameters. Must always hold: it can be read at any time. Values are views of
the unit's buffer. While that has no memory, a parameter shows NaN instead (0 if its dtype has no
NaN), in its own shape, dtype and device: one element, repeated by strides of 0. A script that
reads a divided parameter then gets NaN, where reading the view would end the process.

Setting `data` touches neither the versions that autograd checks nor what it has saved: a parameter
is saved as itself, and shows its values again when backward needs them.

Called by `flat_unit`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


class ParameterViews:
    """The two things that each parameter of one unit can show."""

    def __init__(self, params: Sequence[nn.Parameter], starts: Sequence[int], full: Tensor) -> None:
        """Show nothing yet.

        Args:
            params: The parameters, in their final shapes.
            starts: Where each begins in the buffer, in elements.
            full: The buffer, 1-D.
        """
        self._params = tuple(params)
        self._places = tuple((start, p.shape) for start, p in zip(starts, params, strict=True))
        self._has_nan = full.is_floating_point() or full.is_complex()
        self._blank = full.new_empty(len(params))
        """An element for each parameter, so that nothing written to one shows in another."""
        self._blanks = [
            element.expand(shape)
            for element, (_, shape) in zip(self._blank, self._places, strict=True)
        ]
        self.cut(full)

    def cut(self, full: Tensor) -> None:
        """Let the values be in this buffer from the next `show` on."""
        self._values = [
            full[start : start + shape.numel()].view(shape) for start, shape in self._places
        ]

    def show(self) -> None:
        """Show the values."""
        self._set(self._values)

    def hide(self) -> None:
        """Show that they are not there, also where a script has written since the last time."""
        self._blank.fill_(float("nan") if self._has_nan else 0)
        self._set(self._blanks)

    def _set(self, shown: Sequence[Tensor]) -> None:
        for param, data in zip(self._params, shown, strict=True):
            param.data = data
