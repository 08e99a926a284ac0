"""Deleting old checkpoints, and putting a root in order: `prune` and `repair`.

Both first plan what to do, as plain values, and then do exactly that. `retention` decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.files.object_disk import disk_of
from zero_checkpoint.files.place import Place
from zero_checkpoint.loading.candidates import LATEST, WAS_COMMITTED, Candidate, find
from zero_checkpoint.saving.retention import Best, abandoned, check_policy, expired, remove, sweep
from zero_checkpoint.tools.listing import Check
from zero_checkpoint.tools.verify import misfit


@dataclass(frozen=True, slots=True, kw_only=True)
class UpkeepAction:
    """One thing to do, or done."""

    what: str
    path: Place
    reason: str
    act: Callable[[], None]


@dataclass(slots=True, kw_only=True)
class UpkeepPlan:
    """The actions, in order, and notes on what is left alone and why."""

    actions: list[UpkeepAction] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def plan_prune(
    root: Place,
    *,
    keep_last: int,
    keep_every: int | None,
    keep_best: Best | None = None,
    check: Check,
) -> UpkeepPlan:
    """Which checkpoints to delete, as `retention.expired` says.

    `check` finds the damage of a checkpoint; called newest first, until one is whole.

    Raises:
        CheckpointError: The policy is out of bounds, no checkpoint has the metric, or none is
            whole.
        OSError: A directory or a file could not be read.
    """
    check_policy(keep_last=keep_last, keep_every=keep_every)
    candidates = find(root).candidates
    _check_metric(root, keep_best, candidates)
    protected: tuple[Place, ...] = ()
    plan = UpkeepPlan()
    if candidates:
        # The newest checkpoint whose every byte is good now stays, whatever the policy says; if
        # there is none, nothing is deleted.
        for candidate in candidates:
            if not (damages := check(candidate)):
                plan.notes.append(f"{candidate.path}: verified, every byte is what was saved")
                protected = (candidate.path,)
                break
            first = damages[0]
            plan.notes.append(f"{candidate.path}: damaged: {first.file}: {first.problem}")
        else:
            raise CheckpointError(
                f"{root}: no checkpoint in it is whole, so nothing is deleted: "
                f"{'; '.join(plan.notes)}"
            )
    paths = expired(
        candidates,
        keep_last=keep_last,
        keep_every=keep_every,
        keep_best=keep_best,
        protected=protected,
    )
    reason = f"not among the newest {keep_last}"
    if keep_every is not None:
        reason += f", and its step is not a multiple of {keep_every}"
    if keep_best is not None:
        reason += f", nor among the best {keep_best.count} by {keep_best.metric}"
        plan.notes += [
            f"{c.path}: stays, among the best: {keep_best.metric} = {keep_best.value(c):.6g}"
            for c in keep_best.among(candidates)
        ]
    plan.actions = [
        UpkeepAction(what="delete", path=path, reason=reason, act=partial(remove, path))
        for path in paths
    ]
    return plan


def _check_metric(root: Place, best: Best | None, candidates: Sequence[Candidate]) -> None:
    """Refuse a metric that no checkpoint has."""
    # It may be misspelt, and what was to stay would be deleted.
    if best is None or not candidates or best.among(candidates):
        return
    clients = (candidate.manifest.meta.get("client") for candidate in candidates)
    known = {key for client in clients if isinstance(client, dict) for key in client}
    raise CheckpointError(
        f"{root}: no checkpoint has a number {best.metric!r} in its client_state, so none could be "
        f"the best; nothing is deleted. Known there: {', '.join(sorted(known)) or 'nothing'}"
    )


def plan_repair(root: Place, *, now_s: float, older_than_s: float) -> UpkeepPlan:
    """Delete what dead saves and dead deletions have left; make `latest` name the newest.

    Unfinished saves that changed within `older_than_s` may be alive, and stay.

    Raises:
        OSError: A directory or a file could not be read.
    """
    found = find(root)
    leftovers, kept = abandoned(found.rejected, now_s=now_s, older_than_s=older_than_s)
    plan = UpkeepPlan(notes=kept)
    # Only people may delete what was a checkpoint.
    plan.notes += [r.reason for r in found.rejected if r.why in WAS_COMMITTED]
    plan.actions = [
        UpkeepAction(
            what="sweep", path=item.path, reason=item.reason, act=partial(sweep, item.path)
        )
        for item in leftovers
    ]
    hint = root / LATEST
    # The newest that is whole by its sizes: `latest` is a hint, so no data are read for it. A save
    # aside does not write it either.
    whole = (c for c in found.candidates if not c.manifest.is_aside and misfit(c) is None)
    name = next((each.path.name for each in whole), None)
    try:
        named = hint.read_text(errors="replace").strip()
    except FileNotFoundError:
        named = None
    if name is not None and named != name:
        reason = f"{f'names {named}' if named else 'is missing'}; the newest is {name}"
        act = partial(_write_hint, hint, name)
        plan.actions.append(UpkeepAction(what="write", path=hint, reason=reason, act=act))
    return plan


def _write_hint(hint: Place, name: str) -> None:
    # Not the name that a save uses, which may run meanwhile.
    temporary = hint.with_name(f"{LATEST}.repair")
    disk = disk_of(hint)
    disk.remove(temporary)
    disk.write_whole(temporary, name.encode() + b"\n")
    disk.publish(temporary, hint, replace=True)
    disk.sync_directory(hint.parent)
