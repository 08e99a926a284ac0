"""The reference pages that are made from the code: `make reference` writes them.

Must always hold: a page says what the code says at its tables, parsers and docstrings, and the same
in every version of Python; tests/unit/house/test_reference.py compares.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from docs.environment import VARIABLES
from docs.exit_codes import exit_codes
from docs.reference_api import api
from docs.writing import attribute_docs, page, sentence, table

DOCS = Path(__file__).resolve().parent


# ---- reference-config ----

_CONFIG = """# Config keys

The config is a dict, or a JSON file with DeepSpeed's names. Only the batch must be given. "auto"
stands for the default. A key that is in no table here is an error that names the nearest one.
DeepSpeed's [keys without effect](deepspeed.md#keys-without-effect) are accepted. Its
[missing features](deepspeed.md#features-that-are-not-there) are an error if a config asks for them.
`python -m zero_engine FILE` explains what a config comes to.
"""


def config() -> str:
    """Each key of the config with its type, default and meaning."""
    from zero_contract.sections import join, keys_of, words
    from zero_engine.config import keys, schema

    written = keys.WRITTEN

    def sections(kind: Any, path: str) -> Iterator[str]:
        docs, inner = attribute_docs(kind), []
        rows = []
        for field in dataclasses.fields(kind):
            found = keys_of(kind)[field.name]
            key = join(path, field.name)
            if found.section is not None:
                inner.append((found.section, key))
            else:
                key = written.get(key, key)
                what = words(found.kind).removeprefix("an ").removeprefix("a ")
                row = (f"`{key.rpartition('.')[2]}`", what, _default(field))
                rows.append((*row, docs[field.name]))
        yield f"\n## {path or 'Top level'}\n"
        if path:
            yield f"{sentence((inspect.getdoc(kind) or '').partition(chr(10) * 2)[0])}\n"
        yield from table(("key", "type", "default", "meaning"), iter(rows))
        for section, key in inner:
            yield from sections(section, key)

    others = {path: key for path, key in keys.ALIASES.items() if path not in written.values()}
    aliases = (
        (f"`{path}`", f"`{f'{path.rpartition(chr(46))[0]}.{key}'.removeprefix('.')}`")
        for path, key in sorted(others.items())
    )
    lines = [_CONFIG.rstrip(), *sections(schema.Config, "")]
    lines += ["\n## Other spellings\n", *table(("written", "means"), aliases)]
    return page(*lines)


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return f"`{json.dumps(field.default)}`"
    if field.default_factory is not dataclasses.MISSING:
        return f"`{json.dumps(field.default_factory())}`"
    return "required"


# ---- reference-flags ----

_FLAGS = """# Flags

`--help` of each command says the same; `--version` of `zero-agent`, `zero-ctl` and `zero-ckpt`
prints the version. A flag of `zero-agent` may be written with `-` or `_`
between its words, be shortened to any beginning that no other flag has, and be set by the
environment variable `PET_<FLAG>`, as with torchrun; the command line wins. Lengths of time are
written as seconds, or as 30s, 10m, 2h, 7d.
"""


_ETCD = "etcd"
"""The group of flags that most commands of `zero-ctl` have in common."""


def flags() -> str:
    """The flags of all commands, from their parsers."""
    from zero_agent.command import command_line
    from zero_agent.launch import command as launch
    from zero_checkpoint.tools import parser as ckpt
    from zero_orchestrator.ctl import cli as ctl
    from zero_orchestrator.store import join_token

    lines = [_FLAGS, *_command(command_line.make_parser(), "zero-agent", "##")]
    handed_over = {"launch": launch.make_parser(), "certs": join_token.make_parser()}
    for parser in (ctl.make_parser(), ckpt.make_parser()):
        lines += [f"\n## {parser.prog}\n", f"{sentence(parser.description or '')}\n"]
        commands = _subcommands(parser)
        common = {group.title: group for sub in commands.values() for group in _groups(sub)}
        if _ETCD in common:
            lines += ["Commands that ask etcd also have these flags:\n", *_flags_of(common[_ETCD])]
        for name, sub in commands.items():
            lines += _command(handed_over.get(name, sub), f"{parser.prog} {name}", "###")
    return page(*lines)


def _subcommands(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    kinds = (it for it in parser._actions if isinstance(it, argparse._SubParsersAction))
    return next(kinds).choices


def _command(parser: argparse.ArgumentParser, name: str, level: str) -> Iterator[str]:
    yield f"\n{level} {name}\n"
    yield f"{sentence(parser.description or '')}\n"
    for group in _groups(parser):
        if level == "##" and group.title != "options":
            yield f"\n{level}# {name}: {group.title}\n"
        if level == "##" or group.title != _ETCD:
            yield from _flags_of(group)


def _groups(parser: argparse.ArgumentParser) -> list[argparse._ArgumentGroup]:
    return [group for group in parser._action_groups if _actions(group)]


def _actions(group: argparse._ArgumentGroup) -> list[argparse.Action]:
    everywhere = {"--help", "--version"}
    return [it for it in group._group_actions if not everywhere & {*it.option_strings}]


def _flags_of(group: argparse._ArgumentGroup) -> Iterator[str]:
    yield from table(("flag", "meaning"), (_flag(action) for action in _actions(group)))
    yield ""


def _flag(action: argparse.Action) -> tuple[str, str]:
    names = [name for name in action.option_strings if "_" not in name] or [""]
    value = _value(action)
    words = (f"{name}{'=' if value and name.startswith('--') else ' '}{value}" for name in names)
    return ", ".join(f"`{word.strip()}`" for word in words), str(action.help or "")


def _value(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    if action.choices and action.option_strings:
        return "|".join(map(str, action.choices))
    name = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    return f"[{name}]" if action.nargs == "?" else name


# ---- reference-environment ----

_ENVIRONMENT = """# Environment variables

Each flag of `zero-agent`, and each flag of `zero-ctl` about etcd, can also be set by `PET_<FLAG>`:
`PET_MAX_RESTARTS=3` is `--max-restarts=3`, and `PET_STANDALONE=1` is `--standalone`
([flags](reference-flags.md)). Whatever else is in the agent's environment reaches its workers,
except `ZERO_JOIN_TOKEN`.
"""
_PLACES = """
## A place from other launchers

A worker without `RANK` finds its place in these, in this order; those that tell the
local rank come first. Its world then stays as it is.
"""


def environment() -> str:
    """Every environment variable that is read or set."""
    from zero_comm.worker.distributed import LAUNCHERS

    lines = [_ENVIRONMENT.rstrip()]
    for title, variables in VARIABLES.items():
        rows = ((f"`{name}`", text) for name, text in variables.items())
        lines += [f"\n## {title}\n", *table(("variable", "meaning"), rows)]
    places = (
        (
            launcher.name,
            f"`{launcher.rank}`",
            " or ".join(f"`{name}`" for name in launcher.world),
            f"`{launcher.local_rank}`",
        )
        for launcher in LAUNCHERS
    )
    lines += [_PLACES, *table(("launcher", "rank", "world size", "local rank"), places)]
    return page(*lines)


# ---- reference-events ----

_EVENTS = """# Events

What has happened in a job, and why, is a list of events. `zero-ctl events` shows them in the order
in which they happened; `--json` prints one JSON object a line. With `zero-agent --log-dir=DIR` each
agent also writes its own into `DIR/<job>/events-<node>.jsonl`. Every event has these fields:

| field | meaning |
| --- | --- |
| `time` | Wall clock of the node, in seconds since the epoch. |
| `node` | Name of the node whose agent has logged the event. |
| `round` | Number of the round that it belongs to. |
| `event` | Short name, from the table below. |
| `text` | The event as a sentence, with its reason. |

etcd keeps the last 1000 events that matter and the last 300 others. Those marked *always* matter
in every case; the others do if they are warnings, or are about a worker that failed. In rounds of
more than {nodes} nodes, only what matters is kept in etcd, and what is not marked *always* among
the 300.
"""


def events() -> str:
    """Every kind of event."""
    from zero_contract.journal import EVENTS, LARGE_NODES

    rows = (
        (
            f"`{name}`",
            "always" if event.story else "",
            ", ".join(f"`{fact}`" for fact in event.facts),
            event.when,
        )
        for name, event in EVENTS.items()
    )
    shown = table(("event", "matters", "further fields", "when"), rows)
    return page(_EVENTS.format(nodes=LARGE_NODES), *shown)


# ---- reference-metrics ----

_METRICS = """# Metrics

Prometheus reads the metrics of a node at `/metrics` of `zero-agent --health-port`, and those of all
jobs of an etcd at the port of `zero-ctl metrics --port`. Times are in seconds and sizes in bytes.
Every metric but `zero_etcd_up` has the label `{job}`, and every metric of a node the label
`{node}`. A metric whose value is not known is left out. The name of a counter in a query ends in
`_total`.
"""


def metrics() -> str:
    """Every metric of a job and of a node."""
    from zero_agent.loop.observed.metrics import NODE, NODE_METRICS
    from zero_orchestrator.observe.metrics import ETCD_UP, JOB, JOB_METRICS, RECOVERY_METRICS, Row

    lines = [_METRICS.format(job=JOB, node=NODE).rstrip()]
    of_job: Iterable[Row[Any]] = (*JOB_METRICS, *RECOVERY_METRICS, ETCD_UP)
    for title, listed in (("job", of_job), ("node", NODE_METRICS)):
        rows = (
            (f"`{row.name}`", row.type, ", ".join(f"`{label}`" for label in row.labels), row.help)
            for row in listed
        )
        lines += [f"\n## Metrics of a {title}\n"]
        lines += table(("metric", "type", "further labels", "meaning"), rows)
    return page(*lines)


# ---- reduction: its picture ----

_CELL = 4
"""Characters of a micro-batch in the picture."""


def reduction() -> str:
    """The page as it is, with its pictures drawn again."""
    text = (DOCS / "reduction.md").read_text(encoding="utf-8")
    for name, draw in (("sum", _sum_drawn), ("schedule", _schedule_drawn)):
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, rest = text.split(begin)
        text = "\n".join([before + begin, "```text", *draw(), "```", end + rest.split(end)[1]])
    return text


def _sum_drawn() -> Iterator[str]:
    """Which pieces of 13 micro-batches there are in blocks of 8, level by level."""
    from zero_comm.sums.plan import Expression

    expression = Expression(micro_batches=13, block=8)
    numbers = range(expression.micro_batches)
    yield f"{'micro-batch':12}" + "".join(f"{number:<{_CELL}}" for number in numbers).rstrip()
    for level in range(1, expression.levels + 1):
        bars = ""
        for start in range(0, len(numbers), 1 << level):
            count = min(1 << level, len(numbers) - start)
            bars += ("|" + "-" * (count * _CELL - 3) + "|").ljust(count * _CELL)
        yield f"{f'T(a, {level})':12}" + bars.rstrip()
    blocks = [f"T({start}, {expression.levels})" for start in numbers[:: expression.block]]
    yield f"{'sum':12}" + " + ".join(blocks)


def _schedule_drawn() -> Iterator[str]:
    """What travels and what is kept: two nodes of two ranks, 16 micro-batches, blocks of 8."""
    from zero_comm.sums.plan import Piece, Where, plan_reduction
    from zero_data.global_batch import contiguous, node_turns, strided

    def names(pieces: Sequence[Piece]) -> str:
        return " ".join(f"T({piece.start},{piece.level})" for piece in pieces) or "-"

    nodes, count, block = (2, 2), 16, 8
    assignments = {
        Where.OWNER: strided(4),
        Where.NODE: node_turns(nodes, block),
        Where.LOCAL: contiguous(4),
    }
    for where, assignment in assignments.items():
        rows = assignment.rows(count)
        plan = plan_reduction(rows, block=block, nodes=nodes, where=where)
        yield f'"{where}"'
        heads = (
            "step",
            "run by",
            "nodes send",
            "owners add",
            "owners keep",
            "nodes keep",
            "ranks keep",
        )
        table: list[Sequence[str]] = [heads]
        for number, (row, step) in enumerate(zip(rows, plan.micro_steps, strict=True)):
            sent = [piece for node in step.nodes for piece in node.gives]
            runs = " | ".join(f"{row[i]} {row[i + 1]}" for i in (0, 2))
            kept = [
                max((each.keeps for each in tier), key=len) for tier in (step.nodes, step.ranks)
            ]
            owner = (names(step.owner.gives), names(step.owner.keeps))
            table.append((str(number), runs, names(sent), *owner, *map(names, kept)))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        for cells in table:
            line = "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
            yield "  " + line.rstrip()
        yield ""


# ---- alerts ----


def alerts() -> str:
    """The rules of the PrometheusRule object, for a Prometheus without the operator."""
    path = DOCS.parent / "deploy" / "kubernetes" / "components" / "monitoring" / "alerts.yaml"
    rules = yaml.safe_load(path.read_text(encoding="utf-8"))["spec"]
    made = "# Made by `make reference` from deploy/kubernetes/components/monitoring/alerts.yaml.\n"
    return made + yaml.safe_dump(rules, sort_keys=False, width=100)


PAGES: Mapping[str, Callable[[], str]] = {
    "../deploy/monitoring/alerts.yaml": alerts,
    "exit-codes.md": exit_codes,
    "reference-api.md": api,
    "reference-config.md": config,
    "reference-environment.md": environment,
    "reference-events.md": events,
    "reference-flags.md": flags,
    "reference-metrics.md": metrics,
    "reduction.md": reduction,
}
"""Page -> what makes it."""


def main() -> None:
    """Write all pages."""
    for name, make in PAGES.items():
        (DOCS / name).write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    main()
