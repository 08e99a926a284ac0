"""The route of each worker's output: to this terminal, to a file, or to both.

`--redirects` sends a stream to its file only, `--tee` to its file and to the terminal, with the
worker's name before each line; `--log-dir` alone keeps everything and shows it unchanged. Pure:
`tap.py` moves the bytes.

Source of the flags' meaning: torch.distributed.elastic.multiprocessing (Std, DefaultLogsSpecs).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntFlag, StrEnum
from pathlib import Path
from string import Template
from typing import Any

from zero_orchestrator.errors import SpecError

PREFIX = "[${role_name}${local_rank}]:"
"""Before each line of a stream that is teed, as torchrun does."""
RANK_PREFIX = "[rank{}]: "
"""Before each line in the format `rank`, as torch's own log lines."""


class Format(StrEnum):
    """How the workers' output, and the agent's log, are shown: --log-format."""

    TEXT = "text"
    """As the workers print it."""
    RANK = "rank"
    """With the rank before each line."""
    JSON = "json"
    """One JSON object a line, with the rank and the time."""


class Std(IntFlag):
    """Standard streams, as torchrun numbers them."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


FILES = {Std.OUT: "stdout.log", Std.ERR: "stderr.log"}
NAMES = {Std.OUT: "stdout", Std.ERR: "stderr"}
FILTERED = {Std.OUT: "filtered_stdout.log", Std.ERR: "filtered_stderr.log"}


@dataclass(frozen=True)
class RankSelection:
    """The streams that a flag selects, of some or of all workers of this node."""

    everywhere: Std = Std.NONE
    by_local_rank: Mapping[int, Std] = field(default_factory=dict)

    def of(self, local_rank: int) -> Std:
        """The streams selected of one worker."""
        return self.by_local_rank.get(local_rank, self.everywhere)

    def __bool__(self) -> bool:
        return bool(self.everywhere) or any(self.by_local_rank.values())


def parse_selection(flag: str, text: str) -> RankSelection:
    """`3` -> both streams of all; `0:1,1:3` -> stdout of local rank 0, both of local rank 1.

    Raises:
        SpecError: The text has neither form.
    """
    if re.fullmatch(r"[0-3]", text):
        return RankSelection(Std(int(text)))
    if not re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text):
        raise SpecError(
            f"{flag}={text}: write 0 (nothing), 1 (stdout), 2 (stderr) or 3 (both), or one of "
            "them for each local rank, such as 0:1,1:3"
        )
    pairs = (pair.split(":") for pair in text.split(","))
    return RankSelection(Std.NONE, {int(rank): Std(int(std)) for rank, std in pairs})


def parse_ranks(text: str) -> frozenset[int] | None:
    """`--local-ranks-filter`: `0,2` -> {0, 2}; None, which means all, for an empty text.

    Raises:
        SpecError: The text is no list of numbers.
    """
    if not text:
        return None
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise SpecError(f"--local-ranks-filter={text}: write local ranks, such as 0,1,2")
    return frozenset(map(int, text.split(",")))


@dataclass(frozen=True, kw_only=True)
class Route:
    """The destinations of one stream of one worker."""

    shown: bool = True
    """Whether it is shown on the agent's stream of the same name."""
    prefix: str = ""
    """Written before each line that is shown."""
    file: Path | None = None
    copy: Path | None = None
    """A file of all workers for the shown lines that contain one of `filters`."""
    copy_prefix: str = ""
    filters: tuple[str, ...] = ()
    as_json: bool = False
    """Whether it is shown as JSON, one object a line."""
    file_limit_bytes: int = 0
    """Most bytes that are kept in `file`, and in `copy`, with the older part beside it; 0: no
    limit."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Whose output it is: job, node, round, rank, local_rank and stream."""


@dataclass(frozen=True, kw_only=True)
class Streams:
    """The output flags of this node's workers."""

    redirects: RankSelection = RankSelection()
    tee: RankSelection = RankSelection()
    keep_all: bool = False
    """Whether every stream is kept in a file, and shown as well unless it is redirected."""
    local_ranks: frozenset[int] | None = None
    """The local ranks whose output is shown; None: all."""
    filters: Mapping[Std, tuple[str, ...]] = field(default_factory=dict)
    prefix: str = PREFIX
    format: Format = Format.TEXT
    file_limit_bytes: int = 0
    """Most bytes that are kept of one stream of one worker; 0: no limit."""

    @property
    def needs_files(self) -> bool:
        """Whether a directory for the output is needed."""
        return self.keep_all or bool(self.redirects or self.tee or any(self.filters.values()))

    def route(self, stream: Std, directory: Path, rank: int, local_rank: int, role: str) -> Route:
        """The route of one stream of one worker."""
        teed = bool(self.tee.of(local_rank) & stream)
        redirected = bool(self.redirects.of(local_rank) & stream)
        filtered_out = self.local_ranks is not None and local_rank not in self.local_ranks
        # torchrun's order: the filter of ranks wins over --tee, and --tee over --redirects.
        filters = self.filters.get(stream, ())
        shown = (teed or not redirected) and not filtered_out
        names = {"role_name": role, "local_rank": local_rank, "rank": rank}
        # Safe: the template is the user's, and a name in it that is unknown ends no job.
        name = Template(self.prefix).safe_substitute(names)
        # Filtered lines are copies of what is shown.
        kept, copied = teed or redirected or self.keep_all, bool(filters) and shown
        before = RANK_PREFIX.format(rank) if self.format is Format.RANK else name if teed else ""
        return Route(
            shown=shown,
            prefix=before,
            as_json=self.format is Format.JSON,
            file=directory / str(local_rank) / FILES[stream] if kept else None,
            file_limit_bytes=self.file_limit_bytes if kept or copied else 0,
            copy=directory / FILTERED[stream] if copied else None,
            copy_prefix=name if copied else "",
            filters=filters if copied else (),
        )
