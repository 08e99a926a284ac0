"""The partition of a model's parameters into units.

Owns the choice, as data: names, groups and owners, before any buffer exists. It depends on the
model and the optimizer's groups alone, never on rank, world or stage. Every element of an outermost
ModuleList is a unit, as is a leaf module; everything else is the root unit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from zero_engine.sharding.leaf_modules import z3_leaf_module

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The dtypes by their short names."""
ROOT = ""
"""The name of the root unit's module: the model itself."""

_EXTERNAL = "zero_external"


def make_external(param: nn.Parameter) -> None:
    """Note that other modules use a parameter, too: it will belong to the root."""
    setattr(param, _EXTERNAL, True)


@dataclass(frozen=True, slots=True)
class Member:
    """One parameter; `group` is its param group, None if no optimizer trains it."""

    fqn: str
    param: nn.Parameter
    group: int | None
    small: bool = False
    """Whether it stays whole between uses."""


@dataclass(frozen=True, slots=True)
class Small:
    """Which parameters are small, in elements: those stay whole at stage 3.

    The keys are `stage3_param_persistence_threshold` and `stage3_model_persistence_threshold`;
    `ZeroOptimizer` refuses a step before which ranks have written different values to one.
    """

    most: int
    """Of one parameter."""
    most_together: int

    def names(self, root: nn.Module) -> frozenset[str]:
        """The names of a model's small parameters: in module order, while they fit together."""
        found, total = set(), 0
        for name, param in root.named_parameters():
            if param.numel() <= self.most and total + param.numel() <= self.most_together:
                found.add(name)
                total += param.numel()
        return frozenset(found)


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """The members of one unit, in (param group, module) order, and the module that uses them."""

    name: str
    module: nn.Module
    is_root: bool
    members: tuple[Member, ...]
    dtype: torch.dtype

    @property
    def trained(self) -> bool:
        """Whether the members get gradients; all or none do."""
        return self.members[0].group is not None


def wrapped_modules(root: nn.Module) -> dict[str, nn.Module]:
    """The modules that become units: callable elements of outermost ModuleLists, leaf modules."""
    found: dict[str, nn.Module] = {}

    def visit(name: str, module: nn.Module) -> None:
        for child_name, child in module.named_children():
            path = f"{name}.{child_name}" if name else child_name
            # Containers without a forward are never called, so no hook of theirs would ever run.
            is_called = type(child).forward is not nn.Module.forward
            listed = isinstance(module, nn.ModuleList) and is_called
            if is_called and (listed or z3_leaf_module(child)):
                found[path] = child
            elif not z3_leaf_module(child):  # else all of it belongs to the root
                visit(path, child)

    visit(ROOT, root)
    return found


def aliases(root: nn.Module) -> dict[str, str]:
    """Tied parameters: every further name -> the first name."""
    first: dict[int, str] = {}
    others: dict[str, str] = {}
    for name, param in root.named_parameters(remove_duplicate=False):
        if first.setdefault(id(param), name) != name:
            others[name] = first[id(param)]
    return others


def partition(
    root: nn.Module,
    groups: Mapping[int, int],
    compute_dtype: torch.dtype,
    small: Container[str] = (),
) -> list[UnitSpec]:
    """The units of a model, in module order with the root last.

    `groups` is id(parameter) -> param group, for the trained parameters. In bf16 and fp16 training
    other floating-point ones have their dtype as well. `small` ones stay whole; they change nothing
    of the partition.
    """
    modules = {**wrapped_modules(root), ROOT: root}
    # id(parameter) -> the unit module that alone uses it, else the root.
    unit_of = {
        f"{unit}.{name}": unit
        for unit, module in modules.items()
        if unit != ROOT
        for name, _ in module.named_parameters(remove_duplicate=False)
    }
    users: dict[int, set[str]] = defaultdict(set)
    for name, param in root.named_parameters(remove_duplicate=False):
        external = hasattr(param, _EXTERNAL)
        users[id(param)].add(ROOT if external else unit_of.get(name, ROOT))
    # Tied weights belong to the root, which is gathered from the beginning of forward to the end of
    # backward.
    owners = {key: names.pop() if len(names) == 1 else ROOT for key, names in users.items()}
    units: dict[tuple[str, bool, torch.dtype], list[Member]] = defaultdict(list)
    for fqn, param in root.named_parameters():
        group = groups.get(id(param))
        is_low_precision = compute_dtype != torch.float32 and param.is_floating_point()
        dtype = compute_dtype if is_low_precision else param.dtype
        # Kept apart, so that a unit has one dtype, and travels as a gradient in whole or not at
        # all.
        units[owners[id(param)], group is None, dtype].append(
            Member(fqn, param, group, fqn in small)
        )
    order = {name: position for position, name in enumerate(modules)}
    specs = []
    for key, members in sorted(units.items(), key=lambda item: (order[item[0][0]], item[0][1])):
        module, untrained, dtype = key
        suffix = f" (untrained, {str(dtype).removeprefix('torch.')})" if untrained else ""
        name = (module or "root") + suffix
        # A stable sort: inside a group, module order. Each group is then one run of the unit.
        grouped = sorted(members, key=lambda member: -1 if member.group is None else member.group)
        specs.append(UnitSpec(name, modules[module], module == ROOT, tuple(grouped), dtype))
    return specs
