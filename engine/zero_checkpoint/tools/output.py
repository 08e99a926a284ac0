"""Showing results to people: tables, the tree of tensors, a progress bar; or JSON to programs.

Results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.tree import Tree

from zero_checkpoint.files.place import Place
from zero_checkpoint.format.pieces import BUFFER, PARAM
from zero_checkpoint.loading.candidates import Candidate
from zero_checkpoint.tools.compare import Difference, Relation
from zero_checkpoint.tools.describe import Description, TensorRow
from zero_checkpoint.tools.listing import ListedCheckpoint, ListedStatus
from zero_checkpoint.tools.upkeep import UpkeepAction, UpkeepPlan
from zero_checkpoint.tools.verify import Damage, total_bytes
from zero_checkpoint.tools.verify import Progress as Advance
from zero_contract.decoding import encode

_COLORS = {
    ListedStatus.COMMITTED: "",
    ListedStatus.VERIFIED: "green",
    ListedStatus.UNCOMMITTED: "yellow",
    Relation.DIFFERENT: "yellow",
    Relation.EQUAL: "green",
}
_SHOWN_TENSORS = 4


class _Stdout(Console):
    def on_broken_pipe(self) -> None:
        """Leave a broken pipe to the command line, which has its own exit code for it."""
        raise BrokenPipeError


def console() -> Console:
    """Stdout as it is now."""
    # Wide when it is no terminal, so that nothing is cut in a pipe.
    return _Stdout(soft_wrap=False, width=None if sys.stdout.isatty() else 200, highlight=False)


def print_json(record: object) -> None:
    """One JSON document."""
    # A number that is not finite is a string: many readers refuse NaN and infinity.
    print(json.dumps(json.loads(encode(record), parse_constant=_NOT_FINITE.get), indent=2))


_NOT_FINITE = {"Infinity": "inf", "-Infinity": "-inf", "NaN": "nan"}


def show(as_json: bool, record: object, sentence: str) -> None:
    """A result that is one sentence, or one JSON document."""
    if as_json:
        print_json(record)
    else:
        print(sentence)


@contextmanager
def progress(checkpoint: Candidate, *, quiet: bool) -> Iterator[Advance]:
    """A progress bar on stderr while a checkpoint is read, if stderr is a terminal."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=quiet or not sys.stderr.isatty(),
    )
    with bar:
        task = bar.add_task(checkpoint.path.name, total=total_bytes(checkpoint.manifest))
        yield lambda count: bar.advance(task, count)


@contextmanager
def lasting(text: str, *, quiet: bool) -> Iterator[None]:
    """Show on a terminal's stderr what a command does, and for how long; for unknown sizes."""
    shown = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=quiet or not sys.stderr.isatty(),
    )
    with shown:
        shown.add_task(escape(text), total=None)
        yield


def show_rows(rows: Sequence[ListedCheckpoint]) -> None:
    """`ls`."""
    table = _table("step", "tag", "size", "age", "world", "stage", "status", "directory")
    for row in rows:
        table.add_row(
            _maybe(row.step),
            escape(_maybe(row.tag)),
            "-" if row.size_bytes is None else decimal(row.size_bytes),
            age(row.age_s),
            _maybe(row.world),
            _maybe(row.stage),
            _colored(row.status),
            escape(row.name),
        )
    out = console()
    out.print(table)
    for row in rows:
        if row.reason:
            out.print(escape(f"{row.name}: {row.reason}"), soft_wrap=True)


def show_description(shown: Description) -> None:
    """`show`."""
    out = console()
    table = Table.grid(padding=(0, 2))
    for key, value in _facts(shown):
        table.add_row(f"[bold]{key}[/bold]", escape(str(value)))
    out.print(table)
    for number, group in enumerate(shown.groups):
        options = ", ".join(f"{k}={v}" for k, v in group["hyperparameters"].items())
        head = f"[bold]group {number}[/bold]  {len(group['params'])} parameters"
        out.print(f"{head}  {escape(options)}", soft_wrap=True)
    out.print(tensor_tree(shown.tensors))
    for other, name in shown.aliases.items():
        out.print(escape(f"{other} is tied to {name}"))


def _facts(shown: Description) -> Iterator[tuple[str, object]]:
    """The head of `show`: what is known, in a fixed order."""
    run = shown.run
    params = [tensor for tensor in shown.tensors if tensor.kind == PARAM]
    yield "checkpoint", shown.path + (" (QUARANTINED)" if shown.quarantined else "")
    yield "tag", shown.tag
    yield "step", f"{shown.step}, round {shown.round}"
    yield "written by", f"{shown.world} ranks, {shown.files} files"
    yield "size", decimal(shown.size_bytes)
    yield "parameters", f"{sum(math.prod(t.shape) for t in params):,} in {len(params)} tensors"
    kinds = ", ".join(shown.optimizer_kinds) or "no state per element"
    yield "optimizer", f"{run.get('optimizer') or 'unknown'}: {kinds}"
    for key, label in _RUN.items():
        if run.get(key) is not None:
            yield label, run[key]
    if isinstance(order := run.get("reduction"), Mapping):
        yield "gradients summed", _order(order)
    machines = run.get("hardware")
    for machine in dict.fromkeys(map(_machine, machines if isinstance(machines, list) else ())):
        yield "hardware", machine
    if shown.client:
        yield "client state", ", ".join(shown.client)
    yield "manifest", shown.digest


def _order(reduction: Mapping[str, Any]) -> str:
    """How gradients are summed, from the record of the run."""
    if reduction.get("order") == "native":
        return f"by {reduction.get('backend')} itself, in {reduction.get('dtype')} (native)"
    to_int8 = ", each rounded to int8" if reduction.get("quantized") else ""
    return f"in {reduction.get('order')} order, blocks of {reduction.get('block')}{to_int8}"


def _machine(record: Any) -> str:
    """The hardware of a rank, from the record of the run."""
    named = record if isinstance(record, Mapping) else {}
    parts = (named.get(key) for key in ("device", "processor", "instructions", "kernels"))
    return "; ".join(str(part) for part in parts if part) or "unknown"


_RUN = {
    "stage": "ZeRO stage",
    "dtype": "computed in",
    "samples": "samples consumed",
    "tokens": "tokens consumed",
    "dataset_size": "dataset size",
    "microbatches": "micro-batches per step",
    "micro_batch": "samples per micro-batch",
    "skipped": "steps skipped",
    "seed": "seed",
    "torch": "torch",
    "threads": "threads per rank",
    "weight_hash": "weight hash",
}


def tensor_tree(tensors: Iterable[TensorRow]) -> Tree:
    """Parameters and buffers by the dots in their names, with their optimizer state."""
    by_name: dict[str, list[TensorRow]] = {}
    for tensor in tensors:
        by_name.setdefault(tensor.name, []).append(tensor)
    root = Tree("[bold]tensors[/bold]")
    nodes: dict[tuple[str, ...], Tree] = {(): root}
    for name, kinds in by_name.items():
        *path, last = name.split(".")
        for depth in range(len(path)):
            here = tuple(path[: depth + 1])
            if here not in nodes:
                nodes[here] = nodes[here[:-1]].add(escape(here[-1]))
        first, *others = sorted(kinds, key=lambda t: t.kind not in (PARAM, BUFFER))
        kind = "" if first.kind == PARAM else f" {first.kind}"
        shape = "x".join(map(str, first.shape)) or "scalar"
        text = f"{escape(last)}  [cyan]{first.dtype} {shape}[/cyan]{escape(kind + _norm(first))}"
        if also := ", ".join(t.kind + _norm(t) for t in others):
            text += f"  [dim]+ {escape(also)}[/dim]"
        nodes[tuple(path)].add(text)
    return root


def _norm(tensor: TensorRow) -> str:
    return f" |{tensor.norm:.6g}|" if tensor.norm is not None else ""


def show_damage(path: Place, damages: Sequence[Damage], size_bytes: int) -> None:
    """`verify`, for one checkpoint."""
    out, name = console(), escape(str(path))
    if not damages:
        out.print(f"{name}: [green]intact[/green], {decimal(size_bytes)} verified", soft_wrap=True)
        return
    out.print(f"{name}: [red]DAMAGED[/red] in {len(damages)} places", soft_wrap=True)
    for damage in damages:
        where = f"{damage.file}, bytes {damage.begin}:{damage.end}: {damage.problem}"
        held = ""
        if damage.tensors:
            more = len(damage.tensors) - _SHOWN_TENSORS
            held = f"; it holds {', '.join(damage.tensors[:_SHOWN_TENSORS])}"
            held += f" and {more} more" if more > 0 else ""
        out.print(escape(f"  {where}{held}"), soft_wrap=True)


def show_differences(differences: Sequence[Difference]) -> None:
    """`diff`: what is not equal, then the counts."""
    out = console()
    table = _table("tensor", "relation", "max abs", "max rel", "")
    for item in differences:
        if item.relation is not Relation.EQUAL:
            table.add_row(
                escape(f"{item.kind}/{item.name}"),
                _colored(item.relation),
                _number(item.max_abs),
                _number(item.max_rel),
                escape(item.detail),
            )
    if table.row_count:
        out.print(table)
    out.print(", ".join(f"{n} {relation}" for relation, n in counts(differences).items() if n))


def counts(differences: Sequence[Difference]) -> dict[Relation, int]:
    """How many tensors of each relation."""
    return {r: sum(item.relation is r for item in differences) for r in Relation}


def show_plan(plan: UpkeepPlan, *, dry_run: bool) -> Iterator[UpkeepAction]:
    """`prune` and `repair`: prints each action, then yields it."""
    out = console()
    for note in plan.notes:
        out.print(escape(note), soft_wrap=True)
    for action in plan.actions:
        would = "would " if dry_run else ""
        text = f"{would}{action.what} {action.path}: {action.reason}"
        out.print(escape(text), soft_wrap=True)
        yield action
    if not plan.actions:
        out.print("nothing to do")


def age(seconds: float) -> str:
    """A duration in its largest fitting unit: `90 s`, `12 min`, `5 h`, `3 d`."""
    for unit, length_s, from_s in (("d", 86400, 172800), ("h", 3600, 7200), ("min", 60, 120)):
        if seconds >= from_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _colored(word: ListedStatus | Relation) -> str:
    color = _COLORS.get(word, "red")
    return f"[{color}]{word}[/{color}]" if color else str(word)


def _maybe(value: object) -> str:
    return "-" if value is None else str(value)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
