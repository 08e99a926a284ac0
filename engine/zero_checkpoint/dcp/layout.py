"""Which keys of a DCP checkpoint are the model, its optimizer and the step: a pure decision.

A DCP checkpoint is one flat table. The names that the user chose, and how deep they are nested, are
in the keys: `{"app": AppState(...)}`, as in PyTorch's own tutorial, makes `app.model.0.weight` and
`app.optim.state.0.weight.exp_avg`. If two answers are possible, the error asks the user to choose.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from zero_checkpoint.errors import CheckpointError

STATE, GROUPS = "state.", "param_groups."
_OPTIMIZER = re.compile(
    r"(?P<prefix>(?:.+?\.)??)"
    r"(?:param_groups\.|state\.(?P<name>.+)\.(?:step|exp_avg|exp_avg_sq|momentum_buffer)$)"
)
_MODEL = re.compile(r"(?:.+?\.)??model\.")
_STEPS = ("step", "global_step", "global_steps", "iteration")
"""How a key ends under which the steps are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Which keys are what. A prefix ends with a dot; an empty one is the whole table."""

    model: str
    tensors: Collection[str]
    """The keys of the model."""
    optimizer: str | None
    """None: no optimizer can be used."""
    steps: Collection[str]
    """Keys that count steps."""
    left_out: Collection[str]
    """The shortest prefixes that only unused keys have."""


def find_layout(
    keys: Collection[str],
    tensors: Collection[str],
    weights: Collection[str],
    *,
    model_key: str | None,
    optimizer_key: str | None,
) -> Layout:
    """Which keys of a DCP checkpoint are the model, the optimizer and the step.

    `weights`: the keys that hold floating-point or complex tensors. A given key is None: to be
    found; model "": the whole table.

    Raises:
        CheckpointError: A given key does not exist, there is no model, or several models or
            optimizers are possible.
    """
    # Each optimizer's prefix, and the names of the parameters of which it has state.
    optimizers: dict[str, set[str]] = {}
    for key in keys:
        if match := _OPTIMIZER.match(key):
            names = optimizers.setdefault(match["prefix"], set())
            if match["name"] is not None:
                names.add(match["name"])
    if optimizer_key is not None:
        prefix = _given(optimizer_key, keys, "--optimizer-key")
        optimizers.setdefault(prefix, set())
        wanted = {prefix: optimizers[prefix]}
    else:
        wanted = optimizers
    # No key of an optimizer is taken for weights, also of one that is not wanted.
    others = {key for key in keys if not any(_is_of(key, prefix) for prefix in optimizers)}
    if model_key is not None:
        model = _given(model_key, keys, "--model-key")
    else:
        model = _find_model(others.intersection(weights), wanted.values())
    inside = {key for key in others.intersection(tensors) if key.startswith(model)}
    steps = {key for key in others - set(weights) if key.rpartition(".")[2] in _STEPS}
    # Below a prefix such a key is a buffer of the model; without one, every key is inside.
    steps -= inside if model else set()
    mine = inside - steps
    if not mine:
        raise CheckpointError(f"no model in it; name its key with --model-key: {_tops(keys)}")
    chosen = _choose(wanted, {key.removeprefix(model) for key in mine}, optimizer_key)
    used = mine | steps | {key for key in keys if chosen is not None and _is_of(key, chosen)}
    taken = {prefix for key in used for prefix in _cuts(key)}
    unused = set(keys) - used
    return Layout(
        model=model,
        tensors=sorted(mine),
        optimizer=chosen,
        steps=sorted(steps),
        left_out=sorted({next((p for p in _cuts(key) if p not in taken), key) for key in unused}),
    )


def _is_of(key: str, optimizer: str) -> bool:
    return key.startswith(optimizer) and key[len(optimizer) :].startswith((STATE, GROUPS))


def _given(key: str, keys: Collection[str], flag: str) -> str:
    prefix = f"{key}." if key else ""
    if not any(name.startswith(prefix) for name in keys):
        raise CheckpointError(f"{flag} {key}: there is no such key; there are: {_tops(keys)}")
    return prefix


def _find_model(weights: Collection[str], trained: Collection[Collection[str]]) -> str:
    """The prefix under which all parameters of an optimizer are, or else `model`, or nothing."""
    found: set[str] = set()
    for names in filter(None, trained):
        # Every prefix that makes a key of each of the names.
        first = min(names)
        ends = {key.removesuffix(first) for key in weights if key.endswith(first)}
        found |= {
            prefix
            for prefix in ends
            if (not prefix or prefix.endswith("."))
            and all(prefix + name in weights for name in names)
        }
    if len(found) > 1:
        found = {prefix for prefix in found if _MODEL.fullmatch(prefix)} or found
    elif not found:
        found = {match[0] for key in weights if (match := _MODEL.match(key))} or {""}
        if outside := [key for key in weights if not key.startswith(tuple(found))]:
            raise CheckpointError(
                f"a model may be under {_listed(found)}, and there are other tensors, such as "
                f"{min(outside)}; name the model's key with --model-key, or pass --model-key '' if "
                "all of them are one model"
            )
    if len(found) > 1:
        raise CheckpointError(
            f"a model may be under each of {_listed(found)}; choose with --model-key"
        )
    return found.pop()


def _choose(
    wanted: Mapping[str, Collection[str]], names: Collection[str], key: str | None
) -> str | None:
    """The optimizer that has state for a model's parameters; None if there is none."""
    if key is not None:
        return next(iter(wanted))
    fitting = {
        prefix for prefix, own in wanted.items() if not own or not set(own).isdisjoint(names)
    }
    if len(fitting) > 1:
        raise CheckpointError(
            f"the optimizer may be each of {_listed(fitting)}; choose with --optimizer-key"
        )
    return next(iter(fitting), None)


def _cuts(key: str) -> Iterator[str]:
    """`a`, `a.b`, `a.b.c`."""
    return accumulate(key.split("."), lambda begin, part: f"{begin}.{part}")


def _tops(keys: Collection[str]) -> str:
    return ", ".join(sorted({key.partition(".")[0] for key in keys}))


def _listed(prefixes: Collection[str]) -> str:
    return ", ".join(sorted(prefix.removesuffix(".") or "''" for prefix in prefixes))
