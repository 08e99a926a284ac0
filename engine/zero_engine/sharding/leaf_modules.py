"""Leaf modules: their parameters are one unit, gathered whatever is called inside the module.

Owns the mark on a module. It makes stage 3 exact for modules in which ranks take different
branches, such as a mixture of experts: every rank gathers the whole module when it enters it. Must
always hold: the mark is read at every stage, so that the stages keep giving one result.

Scripts set the mark before `initialize`.

Source: deepspeed.utils.set_z3_leaf_modules, with its names and return values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from torch import nn

from zero_contract.errors import ConfigError

__all__ = [
    "get_z3_leaf_modules",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
]

_LEAF = "_z3_leaf"  # DeepSpeed's attribute: some scripts set it themselves
_DIVIDED = "zero_divided"


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether a module is marked."""
    return bool(getattr(model, _LEAF, False))


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The marked modules of a model."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark one module, or remove its mark.

    Raises:
        ConfigError: The module belongs to an engine already.
    """
    if getattr(model, _DIVIDED, False):
        raise ConfigError(
            f"{type(model).__name__} belongs to an engine already: mark leaf modules before "
            "initialize()"
        )
    setattr(model, _LEAF, flag)


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type | str]
) -> list[nn.Module]:
    """Mark the modules of some classes, given as classes or by name; returns them.

    Raises:
        ConfigError: There is no such module, or it belongs to an engine already.
    """
    return _set(model, leaf_module_classes, flag=True)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type | str]
) -> list[nn.Module]:
    """Remove the marks of some classes; returns the modules. Raises as `set_z3_leaf_modules`."""
    return _set(model, leaf_module_classes, flag=False)


def _set(model: nn.Module, classes: Iterable[type | str], *, flag: bool) -> list[nn.Module]:
    wanted = list(classes)
    found = [m for m in model.modules() if type(m) in wanted or type(m).__name__ in wanted]
    if not found:
        names = ", ".join(c if isinstance(c, str) else c.__name__ for c in wanted)
        there = ", ".join(sorted({type(m).__name__ for m in model.modules()}))
        raise ConfigError(f"leaf modules: {names}: no such module in the model; it has: {there}")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def mark_divided(model: nn.Module) -> None:
    """Note that an engine has divided the parameters: marks would come too late."""
    for module in model.modules():
        setattr(module, _DIVIDED, True)


def mark_configured(
    model: nn.Module,
    classes: Collection[str],
    names: Collection[str],
    name_suffixes: Collection[str],
) -> None:
    """Mark what the config's zero_optimization.leaf_module names.

    Raises:
        ConfigError: A class, name or suffix that no module has.
    """
    named = dict(model.named_modules())

    def is_of_class(name: str, rule: str) -> bool:
        cls = type(named[name])
        return rule in (cls.__name__, f"{cls.__module__}.{cls.__qualname__}")

    rules: dict[str, tuple[Collection[str], Callable[[str, str], bool]]] = {
        "classes": (classes, is_of_class),
        "names": (names, lambda name, rule: name == rule),
        "name_suffixes": (name_suffixes, lambda name, rule: name.endswith(rule)),
    }
    for key, (wanted, fits) in rules.items():
        for rule in wanted:
            found = [name for name in named if fits(name, rule)]
            if not found:
                raise ConfigError(
                    f"zero_optimization.leaf_module.{key}: no module of the model fits {rule!r}"
                )
            for name in found:
                set_z3_leaf_module(named[name], True)
