"""The hosts of a job and their slots (GPUs): DeepSpeed's hostfile and its filters.

    # comment
    worker-1 slots=4
    worker-2 slots=2

A filter is `HOST[:SLOT,SLOT...]`, several are joined with `@`: `worker-1@worker-2:0,1`. The order
of hosts is the hostfile's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from zero_orchestrator.errors import SpecError

Slots = tuple[int, ...]
"""The numbers of the slots (GPUs) of one host."""
Hosts = Mapping[str, Slots]
"""The hosts, in order."""

_LINE = re.compile(r"(?P<host>\S+)\s+slots=(?P<slots>\d+)")
_HOST = re.compile(r"([A-Za-z0-9_][\w.-]*@)?(\[?[A-Za-z0-9_:][\w.:%-]*\]?)", re.ASCII)
"""Names that every launcher takes for one host, and none for a flag, a list or a file."""


def read_hostfile(path: Path) -> Hosts:
    """Read the hosts of a hostfile.

    Raises:
        SpecError: The file cannot be read, or a line is malformed or names a host again.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"--hostfile={path}: cannot be read: {error}") from error
    return parse_hostfile(lines, str(path))


def parse_hostfile(lines: Iterable[str], where: str) -> Hosts:
    """As `read_hostfile`; `where` names the file in messages."""
    hosts: dict[str, Slots] = {}
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        found = _LINE.fullmatch(text)
        if found is None or int(found["slots"]) < 1:
            raise SpecError(f"{where}:{number}: {text!r}: write HOST slots=N, with N from 1")
        if _HOST.fullmatch(found["host"]) is None:
            raise SpecError(
                f"{where}:{number}: {found['host']!r} does not name one host; write NAME, "
                "USER@NAME or an address"
            )
        if found["host"] in hosts:
            raise SpecError(f"{where}:{number}: host {found['host']} is there twice; leave one out")
        hosts[found["host"]] = tuple(range(int(found["slots"])))
    if not hosts:
        raise SpecError(f"{where}: names no host; write one a line, as HOST slots=N")
    return hosts


def select(
    hosts: Hosts,
    *,
    include: str = "",
    exclude: str = "",
    num_nodes: int | None = None,
    num_slots: int | None = None,
) -> Hosts:
    """Select hosts and slots by the flags: the filters, and how many of them, the first ones.

    Raises:
        SpecError: Two of these contradict each other, or select hosts or slots that do not exist.
    """
    # As DeepSpeed: which of two filters is applied first would change the hosts.
    if include and exclude:
        raise SpecError("--include and --exclude: give one of them")
    counted = [name for name, n in (("nodes", num_nodes), ("gpus", num_slots)) if n is not None]
    if (include or exclude) and counted:
        raise SpecError(f"--num-{counted[0]} beside --include or --exclude: give one of them")
    if include:
        # In the hostfile's order, whatever that of the filter is.
        wanted = _parse_filter("--include", include, hosts)
        return {host: wanted[host] for host in hosts if host in wanted}
    if exclude:
        unwanted = _parse_filter("--exclude", exclude, hosts)
        left = {
            host: tuple(slot for slot in slots if slot not in unwanted.get(host, ()))
            for host, slots in hosts.items()
        }
        if not any(left.values()):
            raise SpecError(f"--exclude={exclude}: no host is left; leave one host in")
        return {host: slots for host, slots in left.items() if slots}
    if num_nodes is not None and not 1 <= num_nodes <= len(hosts):
        raise SpecError(f"--num-nodes={num_nodes}: the hostfile has {len(hosts)}; write 1 to that")
    chosen = dict(list(hosts.items())[:num_nodes])
    if num_slots is None:
        return chosen
    for host, slots in chosen.items():
        if not 1 <= num_slots <= len(slots):
            raise SpecError(f"--num-gpus={num_slots}: host {host} has {len(slots)} slots")
    return {host: slots[:num_slots] for host, slots in chosen.items()}


def _parse_filter(flag: str, text: str, hosts: Hosts) -> Hosts:
    # A host may itself have an @ or a colon in it: USER@NAME, or an IPv6 address.
    names = "|".join(map(re.escape, sorted(hosts, key=len, reverse=True)))
    pattern = re.compile(rf"\s*({names})(?::(\d+(?:,\d+)*))?\s*(@|\Z)")
    found: dict[str, Slots] = {}
    more, end = "@", 0
    while more:
        part = pattern.match(text, end)
        if part is None:
            unread = text[end:].partition("@")[0].strip()
            host = unread.partition(":")[0]
            if host in hosts:
                raise SpecError(f"{flag}={text}: {unread!r}: write HOST or HOST:0,1")
            known = ", ".join(hosts)
            raise SpecError(f"{flag}={text}: {host!r} is not in the hostfile, which has {known}")
        host, numbers, more = part.groups()
        end = part.end()
        slots = tuple(map(int, numbers.split(","))) if numbers else hosts[host]
        if unknown := sorted(set(slots) - set(hosts[host])):
            raise SpecError(
                f"{flag}={text}: host {host} has slots 0 to {len(hosts[host]) - 1}, not "
                f"{', '.join(map(str, unknown))}"
            )
        found[host] = tuple(sorted({*found.get(host, ()), *slots}))
    return found
