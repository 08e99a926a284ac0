"""YAML into frozen records, with the line of every value.

The fields of a record are its keys; the metadata of a field has the reader of its value (`entry`).

Must always hold: an unknown key is an error that names the nearest known key; a value is read as
it is written, so `2:16` stays text (YAML 1.1 would read the number 136, in base 60); one error
lists all mistakes of a file, each with its line.
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
"""Converts text to a value, or raises a ValueError that names what to write instead."""
Read = Callable[["Walk", yaml.Node, str], Any]
"""Converts the YAML node at a path to a value, and adds what is wrong to the walk."""

_MISSING = dataclasses.MISSING
_NULL = "tag:yaml.org,2002:null"


class JobFileError(SpecError):
    """A job file is wrong; the message lists every problem with its line."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is wrong in a job file."""

    key: str
    """Path of the key, such as `checkpoint.save_s`; empty: the file as a whole."""
    text: str
    """What is wrong, and the remedy."""
    is_fatal: bool = True
    """Whether the job cannot run; otherwise the problem is printed as a warning."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """The file of a record, and the line of each key."""

    file: str
    lines: Mapping[str, int]
    """Key -> line, from 1. A key that is not in the file has the line of its section."""

    def message(self, problem: Problem) -> str:
        """The problem as one line: `job.yaml:7: nodes: minimum 4 exceeds ...`."""
        return f"{self.file}:{self._line(problem.key)}: " + ": ".join(
            part for part in (problem.key, problem.text) if part
        )

    def refuse(self, problems: Iterable[Problem]) -> None:
        """Raise one error with all problems, in the order of their lines.

        Raises:
            JobFileError: There is at least one problem.
        """
        if found := sorted(problems, key=lambda one: self._line(one.key)):
            raise JobFileError("\n".join(map(self.message, found)))

    def _line(self, key: str) -> int:
        while key and key not in self.lines:
            key = key.rpartition(".")[0]
        return self.lines.get(key, 1)


def load(path: Path, cls: type[Any]) -> tuple[Any, Source]:
    """The record in a file.

    Raises:
        JobFileError: It cannot be read, is not YAML, or is no such record.
    """
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
    except RecursionError as error:
        raise JobFileError(f"{path}: is nested too deeply") from error
    if node is None:
        raise JobFileError(f"{path}: is empty; deploy/job.yaml is an example")
    walk = Walk()
    record = walk.section(cls, node, "")
    source = Source(file=str(path), lines=walk.lines)
    source.refuse(walk.problems)
    return record, source


@dataclass
class Walk:
    """One pass over a file: the problems so far, and the line of each key."""

    problems: list[Problem] = field(default_factory=list)
    lines: dict[str, int] = field(default_factory=dict)

    def section(self, cls: type[Any], node: yaml.Node, path: str) -> Any:
        """The record of a mapping; None if the mapping has a problem."""
        before = len(self.problems)
        fields = {one.name: one for one in dataclasses.fields(cls)}
        values = {}
        for name, where, value in self.items(node, path):
            if name not in fields:
                near = nearest(name, tuple(fields))
                keys = f"the keys here are {', '.join(fields)}"
                remedy = f"did you mean {near}?" if near else keys
                self.wrong(where, f"there is no such key; {remedy}")
            elif not isinstance(value, yaml.ScalarNode) or value.tag != _NULL:
                values[name] = fields[name].metadata["read"](self, value, where)
        for name, one in fields.items():
            is_needed = one.default is _MISSING and one.default_factory is _MISSING
            if name not in values and is_needed:
                self.wrong(_join(path, name), f"is missing; {one.metadata['help']}")
        return cls(**values) if len(self.problems) == before else None

    def items(self, node: yaml.Node, path: str) -> Iterator[tuple[str, str, yaml.Node]]:
        """Name, path and value of each entry of a mapping; a repeated name is a problem."""
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
        """Add a problem."""
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
    """A list of values; one value is read as a list with that value."""
    one = scalar(convert)

    def read(walk: Walk, node: yaml.Node, path: str) -> Any:
        items = node.value if isinstance(node, yaml.SequenceNode) else [node]
        return tuple(one(walk, item, path) for item in items)

    return read


def table(walk: Walk, node: yaml.Node, path: str) -> Any:
    """A mapping of names to text."""
    text = scalar(str)
    return {name: text(walk, value, where) for name, where, value in walk.items(node, path)}


def tree(walk: Walk, node: yaml.Node, path: str) -> Any:
    """A mapping of another format, with YAML's own types."""
    for _ in walk.items(node, path):
        pass  # only to find out what is wrong
    try:
        return yaml.SafeLoader("").construct_document(node)
    except yaml.YAMLError as error:
        walk.wrong(path, f"cannot be read: {error}")
        return None


def section(cls: type[Any]) -> Read:
    """A record inside of another."""
    return lambda walk, node, path: walk.section(cls, node, path)


def either(convert: Convert, cls: type[Any]) -> Read:
    """One value that `convert` makes a record of, or the keys of that record."""
    short, long = scalar(convert), section(cls)

    def read(walk: Walk, node: yaml.Node, path: str) -> Any:
        return (short if isinstance(node, yaml.ScalarNode) else long)(walk, node, path)

    return read


def entry(read: Read, help: str, default: Any = _MISSING) -> Any:
    """A field that is read from a file; an error of a missing key quotes `help`."""
    metadata = {"read": read, "help": help}
    if default is _MISSING:
        return field(metadata=metadata)
    if isinstance(default, dict):
        return field(metadata=metadata, default_factory=lambda: dict(default))
    return field(metadata=metadata, default=default)


# ---- paths, lines and texts of nodes ----


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _show(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return str(node.value) or "nothing"
    return "a list" if isinstance(node, yaml.SequenceNode) else "keys with values"
