"""An optimizer's state_dict among the keys of a DCP checkpoint.

It is as `torch.distributed.checkpoint.state_dict` makes it; its plain and its flattened form
(`flatten_optimizer_state_dict`) become the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from zero_checkpoint.dcp.layout import GROUPS, STATE
from zero_checkpoint.state.torch_state import group_record, plain

Value = Callable[[str], Any]
"""From a key to its value."""


@dataclass(frozen=True)
class Optimizer:
    """The values of an optimizer by names."""

    state: Mapping[str, Mapping[str, Any]]
    """Parameter -> key -> value."""
    options: Mapping[str, Mapping[str, Any]]
    """Group number, or in the flattened form parameter, -> option -> value."""

    @staticmethod
    def read(keys: Iterable[str], value: Value, prefix: str | None) -> Optimizer:
        """The optimizer under a prefix; empty without one."""
        if prefix is None:
            return Optimizer({}, {})
        return Optimizer(
            _nested(keys, value, prefix + STATE), _nested(keys, value, prefix + GROUPS)
        )

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """Optimizer key -> parameter -> one value per element."""
        moments: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for name, state in self.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim() > 0:
                    moments[key][name] = value
        return moments

    def groups(self, params: Collection[str]) -> list[dict[str, Any]]:
        """The param groups in the engine's form."""
        groups: list[tuple[list[str], Mapping[str, Any]]] = []
        by_options: dict[str, list[str]] = defaultdict(list)
        for key, options in self.options.items():
            if "params" in options:
                groups.append((list(options["params"]), options))
            elif key in params:  # flattened: parameters with the same options were one group
                alike = repr(sorted((k, plain(v, None)) for k, v in options.items()))
                by_options[alike].append(key)
        groups += [(names, self.options[names[0]]) for names in by_options.values()]
        # The numbers of the first that has any: torch makes no state for what had no gradient.
        return [
            group_record(
                names, options, next((self.state[n] for n in names if n in self.state), {})
            )
            for names, options in groups
        ]


def _nested(keys: Iterable[str], value: Value, prefix: str) -> dict[str, dict[str, Any]]:
    """`PREFIX<owner>.<key>` -> owner -> key -> value; no key of an optimizer contains a dot."""
    nested: dict[str, dict[str, Any]] = defaultdict(dict)
    for name in keys:
        if name.startswith(prefix):
            owner, _, key = name.removeprefix(prefix).rpartition(".")
            nested[owner][key] = value(name)
    return nested
