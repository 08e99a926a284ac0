"""Leaf modules: their parameters are one unit, gathered whatever is called inside the module.

It makes stage 3 exact for modules in which ranks take different branches, such as a mixture of
experts: every rank gathers the whole module when it enters it. Scripts set the mark before
`initialize`. Source: deepspeed.utils.set_z3_leaf_modules, with its names and return values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from torch import nn

from zero_contract.errors import ConfigError

__all__ = [
    "get_z3_leaf_modules",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
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
    model: nn.Module, leaf_module_classes: Iterable[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules of some classes and of their subclasses, or by the name of a class.

    Returns:
        The modules, inner ones first.

    Raises:
        ConfigError: There is no such module, and `raise_if_not_found`; or one belongs to an engine
            already.
    """
    return _set(model, leaf_module_classes, raise_if_not_found, flag=True)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Remove the marks of some classes; as `set_z3_leaf_modules`."""
    return _set(model, leaf_module_classes, raise_if_not_found, flag=False)


def set_z3_leaf_modules_by_name(
    model: nn.Module,
    module_names: Iterable[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by their names in `named_modules()`; returns them, and names without a module.

    Raises: as `set_z3_leaf_modules`, if one of the names is missing.
    """
    return _set_named(model, module_names, str.__eq__, raise_if_not_found, flag=flag)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module,
    module_name_suffixes: Iterable[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by the ends of their names; as `set_z3_leaf_modules_by_name`."""
    return _set_named(model, module_name_suffixes, str.endswith, raise_if_not_found, flag=flag)


def _is_of(module: nn.Module, wanted: type | str) -> bool:
    cls = type(module)
    if isinstance(wanted, str):
        return wanted in (cls.__name__, f"{cls.__module__}.{cls.__qualname__}")
    return isinstance(module, wanted)


def _set(
    model: nn.Module, classes: Iterable[type | str], must_be_there: bool, *, flag: bool
) -> list[nn.Module]:
    wanted = list(classes)
    found: list[nn.Module] = []
    # `apply` comes to inner modules first, and DeepSpeed returns them in this order.
    model.apply(lambda m: found.append(m) if any(_is_of(m, each) for each in wanted) else None)
    if not found and must_be_there:
        names = ", ".join(c if isinstance(c, str) else c.__name__ for c in wanted)
        there = ", ".join(sorted({type(m).__name__ for m in model.modules()}))
        raise ConfigError(f"leaf modules: {names}: no such module in the model; it has: {there}")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def _set_named(
    model: nn.Module,
    wanted: Iterable[str],
    fits: Callable[[str, str], bool],
    must_be_there: bool,
    *,
    flag: bool,
) -> tuple[list[nn.Module], list[str]]:
    found: dict[nn.Module, None] = {}
    missing = []
    for each in wanted:
        matching = [module for name, module in model.named_modules() if fits(name, each)]
        found.update(dict.fromkeys(matching))
        missing += [] if matching else [each]
    if missing and must_be_there:
        raise ConfigError(f"leaf modules: no module of the model fits {', '.join(missing)}")
    for module in found:
        set_z3_leaf_module(module, flag)
    return list(found), missing


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
    rules: dict[str, tuple[Collection[str], Callable[[str, str], bool]]] = {
        "classes": (classes, lambda name, rule: _is_of(named[name], rule)),
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
