"""YAML into frozen records, with the line of every value.

A record's fields are the keys: each says in its metadata how its value is read (`entry`). This
module owns the walk over the file and the wording of what is wrong in it; it knows no job.

Must always hold: a key that nothing reads is an error that names the nearest known one; a value
is read as it is written, so `2:16` stays what it is (YAML 1.1 would read the number 136, in base
60); every mistake of a file is told at once, each with its line. Who calls it: `schema`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from zero_contract.values import nearest
from zero_orchestrator.errors import SpecError

Convert = Callable[[str], Any]
"""Makes a value of its text; a ValueError says what it should have been."""
Read = Callable[["Walk", yaml.Node, str], Any]

_MISSING = dataclasses.MISSING


class JobFileError(SpecError):
    """A job file says something that cannot be; the message names every line that does."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is wrong, and where."""

    key: str
    """`checkpoint.save_s`; empty: the file as a whole."""
    text: str
    """What, and the remedy."""
    is_fatal: bool = True
    """Whether the job cannot work so; otherwise it may, and the user should know."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where things are written."""

    file: str
    lines: Mapping[str, int]
    """Key -> line, from 1. A key that is not in the file is at its section's line."""

    def tell(self, problem: Problem) -> str:
        """`job.yaml:7: nodes: minimum 4 exceeds ...`."""
        return f"{self.file}:{self._line(problem.key)}: " + ": ".join(
            part for part in (problem.key, problem.text) if part
        )

    def refuse(self, problems: Iterable[Problem]) -> None:
        """Raise all of them, in the order of their lines, if there are any.

        Raises:
            JobFileError: There are.
        """
        if found := sorted(problems, key=lambda one: self._line(one.key)):
            raise JobFileError("\n".join(map(self.tell, found)))

    def _line(self, key: str) -> int:
        while key and key not in self.lines:
            key = key.rpartition(".")[0]
        return self.lines.get(key, 1)


def load(path: Path, cls: type[Any]) -> tuple[Any, Source]:
    """The record in a file.

    Raises:
        JobFileError: It cannot be read, is not YAML, or is no such record.
    """
    node = _compose(path)
    walk = Walk()
    record = walk.section(cls, node, "")
    source = Source(file=str(path), lines=walk.lines)
    source.refuse(walk.problems)
    return record, source


def _compose(path: Path) -> yaml.Node:
    try:
        node = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as error:
        raise JobFileError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise JobFileError(f"{path}: is not UTF-8 text") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise JobFileError(f"{path}:{line}: is not YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise JobFileError(f"{path}: is not YAML: {error}") from error
    if node is None:
        raise JobFileError(f"{path}: is empty; deploy/job.yaml is an example")
    return node


@dataclass
class Walk:
    """One pass over a file: what was found wrong, and where the keys are."""

    problems: list[Problem] = field(default_factory=list)
    lines: dict[str, int] = field(default_factory=dict)

    def section(self, cls: type[Any], node: yaml.Node, path: str) -> Any:
        """The record of a mapping; None if its problems leave none."""
        before = len(self.problems)
        fields = {one.name: one for one in dataclasses.fields(cls)}
        values = {}
        for name, where, value in self.items(node, path):
            if name not in fields:
                near = nearest(name, tuple(fields))
                keys = f"the keys here are {', '.join(fields)}"
                remedy = f"did you mean {near}?" if near else keys
                self.wrong(where, f"there is no such key; {remedy}")
            elif not _is_null(value):
                values[name] = fields[name].metadata["read"](self, value, where)
        for name, one in fields.items():
            if name not in values and _is_needed(one):
                self.wrong(_join(path, name), f"is missing; {one.metadata['help']}")
        return cls(**values) if len(self.problems) == before else None

    def items(self, node: yaml.Node, path: str) -> Iterator[tuple[str, str, yaml.Node]]:
        """A mapping's entries: name, path and value; a name given twice is a problem."""
        if not isinstance(node, yaml.MappingNode):
            self.lines.setdefault(path, _line(node))
            self.wrong(path, f"{_show(node)}: keys with values are needed here")
            return
        seen: dict[str, int] = {}
        for key, value in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else _show(key)
            where = _join(path, name)
            self.lines[where] = _line(key)
            if name in seen:
                self.wrong(where, f"is given twice, first in line {seen[name]}; keep one")
                continue
            seen[name] = _line(key)
            yield name, where, value

    def wrong(self, key: str, text: str) -> None:
        """Note a problem."""
        self.problems.append(Problem(key=key, text=text))


# ---- how values are read ----


def scalar(convert: Convert) -> Read:
    """One value."""

    def read(walk: Walk, node: yaml.Node, path: str) -> Any:
        if not isinstance(node, yaml.ScalarNode):
            walk.wrong(path, f"{_show(node)}: one value is needed here")
            return None
        try:
            return convert(node.value)
        except ValueError as error:
            walk.wrong(path, f"{node.value}: {error}")
            return None

    return read


def sequence(convert: Convert) -> Read:
    """A list of values; one value alone is a list of it."""
    one = scalar(convert)

    def read(walk: Walk, node: yaml.Node, path: str) -> Any:
        items = node.value if isinstance(node, yaml.SequenceNode) else [node]
        return tuple(one(walk, item, path) for item in items)

    return read


def table(walk: Walk, node: yaml.Node, path: str) -> Any:
    """Names with values, all of them text."""
    text = scalar(str)
    return {name: text(walk, value, where) for name, where, value in walk.items(node, path)}


def section(cls: type[Any]) -> Read:
    """A record inside of another."""
    return lambda walk, node, path: walk.section(cls, node, path)


def either(convert: Convert, cls: type[Any]) -> Read:
    """One value, or a record of the same."""
    short, long = scalar(convert), section(cls)

    def read(walk: Walk, node: yaml.Node, path: str) -> Any:
        return (short if isinstance(node, yaml.ScalarNode) else long)(walk, node, path)

    return read


def entry(read: Read, help: str, default: Any = _MISSING) -> Any:
    """A field that is read from a file; `help` says what to write there."""
    metadata = {"read": read, "help": help}
    if default is _MISSING:
        return field(metadata=metadata)
    if isinstance(default, dict):
        return field(metadata=metadata, default_factory=lambda: dict(default))
    return field(metadata=metadata, default=default)


# ---- words ----


def _is_needed(one: dataclasses.Field[Any]) -> bool:
    return one.default is _MISSING and one.default_factory is _MISSING


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _show(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return str(node.value) or "nothing"
    return "a list" if isinstance(node, yaml.SequenceNode) else "keys with values"
