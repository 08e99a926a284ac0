"""Whose the checkpoints of a directory are: those of this run, or those of another one.

Two jobs that are given one directory would delete, and after a failure load, each other's
checkpoints. So a run saves into a directory, and deletes from it, only if every checkpoint there
that is newer than the last one that this run has loaded or written was there when it loaded, or is
its own. Rank 0 decides; its process keeps what it has seen.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache

from zero_checkpoint.files.place import Place
from zero_checkpoint.format.manifest import MANIFEST, Manifest
from zero_checkpoint.format.parse import ManifestError
from zero_checkpoint.loading.candidates import committed, read_manifest
from zero_contract import worker as contract

_MOST_RUNS = 256
"""The most ids in a manifest; the oldest are left out."""


@dataclass
class _Seen:
    """The directories that this process has loaded from or saved to."""

    names: dict[str, set[str]] = field(default_factory=dict)
    """By directory: the checkpoints that were there at a load, and those that it wrote."""
    continued: list[str] = field(default_factory=list)
    """The runs that this one continues, oldest first."""


_seen = _Seen()


def runs() -> tuple[str, ...]:
    """For a manifest: the runs that this one continues, oldest first, and this one."""
    # Under an agent the job has an id, and keeps it over all restarts.
    own = os.environ.get(contract.ENV_RUN) or _drawn(os.getpid())
    before = [run for run in _seen.continued if run != own]
    return (*before[1 - _MOST_RUNS :], own)


@cache
def _drawn(pid: int) -> str:
    """The id of a process without an agent; a fork of it has another one."""
    del pid
    return secrets.token_hex(8)


def loaded(root: Place, present: Iterable[str], of_runs: Iterable[str]) -> None:
    """A load has ended.

    `present` are the checkpoints that were there when it began, `of_runs` is `Manifest.runs` of the
    one that was loaded, nothing without one.
    """
    _seen.names[_key(root)] = set(present)
    _seen.continued += [run for run in of_runs if run not in _seen.continued]


def is_own(manifest: Manifest) -> bool:
    """Whether this run has saved a checkpoint; without an agent, it or one that it continues."""
    return contract.ENV_RUN not in os.environ or manifest.runs[-1:] == runs()[-1:]


def written(root: Place, name: str) -> None:
    """This run has made a checkpoint's directory."""
    _seen.names.setdefault(_key(root), set()).add(name)


def refusal(root: Place) -> str:
    """Why this run must not save to a directory, nor delete from it; "" if it may.

    From then on, it knows what is there.

    Raises:
        OSError: The directory or a manifest could not be read.
    """
    present = list(committed(root))
    known = _seen.names.get(_key(root))
    for path in present:
        if known is not None and path.name in known:
            break  # newest first: what is older is no concern of this run
        try:
            manifest = read_manifest(path / MANIFEST)
        except (ManifestError, FileNotFoundError):  # it is no candidate, or is being deleted
            continue
        ours = runs()
        # Where it has not loaded, such as from the directory of the best ones, those of the runs
        # that this one continues are its own as well: a script that is started again by hand knows
        # the checkpoints of its earlier starts.
        if manifest.runs[-1:] == ours[-1:] or (known is None and {*manifest.runs[-1:]} & {*ours}):
            break
        when = "since this run has loaded from there" if known is not None else "by another run"
        return (
            f"{root} has a newer checkpoint that this run has neither loaded nor written: "
            f"{path.name} (tag {manifest.tag!r}), saved {when}. Two runs in one directory would "
            "delete and load each other's checkpoints: give each run a directory of its own, or "
            "end the other run, and load its newest checkpoint before the first save"
        )
    if known is None:
        _seen.names[_key(root)] = {path.name for path in present}
    return ""


def _key(root: Place) -> str:
    return str(root.resolve())
