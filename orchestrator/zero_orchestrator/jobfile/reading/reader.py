"""YAML into frozen records, with the line of every value.

An unknown key is an error that names the nearest known key; one error lists all mistakes of a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_origin

import yaml

from zero_contract.sections import Decoder, join, keys_of, parts
from zero_orchestrator.errors import SpecError

Tree = Mapping[str, Any]
"""The type of a key whose value is of another format, with YAML's own types."""
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
class JobSource:
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


def load(path: Path, cls: type[Any]) -> tuple[Any, JobSource]:
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
    if not isinstance(node, yaml.MappingNode):
        raise JobFileError(f"{path}:1: {_text(node)}: keys with values are needed here")
    walk = _Walk()
    record, wrong = Decoder().read(cls, walk.section(cls, node, ""))
    source = JobSource(file=str(path), lines=walk.lines)
    source.refuse([*walk.problems, *(Problem(key=key, text=text) for key, text in wrong)])
    return record, source


@dataclass(frozen=True)
class _Other:
    """What stands in the place of a text, in words; no type accepts it."""

    kind: str

    def __repr__(self) -> str:
        return self.kind


@dataclass
class _Walk:
    """One pass over a file: the problems that a decoder cannot see, and the line of each key."""

    problems: list[Problem] = field(default_factory=list)
    lines: dict[str, int] = field(default_factory=dict)

    def section(self, cls: Any, node: yaml.Node, path: str) -> Any:
        """The values of a section as written; a key that is left empty has its default."""
        if not isinstance(node, yaml.MappingNode):
            return _text(node)
        keys = keys_of(cls)
        return {
            name: self._value(keys[name].kind, value, where) if name in keys else None
            for name, where, value in self._items(node, path)
            if value.tag != _NULL or name not in keys
        }

    def _value(self, kind: Any, node: yaml.Node, path: str) -> Any:
        wanted = parts(kind)[0]
        if kind == Tree and isinstance(node, yaml.MappingNode):
            try:  # a loader of no text, for its constructors alone
                return yaml.SafeLoader("").construct_document(node)
            except (yaml.YAMLError, ValueError) as error:
                self.problems.append(Problem(key=path, text=f"cannot be read: {error}"))
                return {}
        if hasattr(wanted, "__dataclass_fields__"):
            return self.section(wanted, node, path)
        if get_origin(wanted) is dict and isinstance(node, yaml.MappingNode):
            return {name: _text(value) for name, _, value in self._items(node, path)}
        if get_origin(wanted) is tuple and isinstance(node, yaml.SequenceNode):
            self.lines |= {f"{path}[{at}]": _line(one) for at, one in enumerate(node.value)}
            return [_text(one) for one in node.value]
        return _text(node)

    def _items(self, node: yaml.MappingNode, path: str) -> Iterator[tuple[str, str, yaml.Node]]:
        """Name, path and value of each entry of a mapping; a repeated name is a problem."""
        seen: dict[str, int] = {}
        for key, value in node.value:
            name = str(_text(key))
            where = join(path, name)
            self.lines[where] = _line(key)
            if name in seen:  # YAML itself would take the last one without a word
                text = f"is given twice, first in line {seen[name]}; keep one"
                self.problems.append(Problem(key=where, text=text))
            else:
                seen[name] = _line(key)
                yield name, where, value


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _text(node: yaml.Node) -> str | _Other:
    # No deeper than the types of the keys: by anchors, a file of a few lines may be nested in
    # itself, or have more values than any memory.
    # As it is written: of `2:16` YAML 1.1 would make the number 136, in base 60.
    if isinstance(node, yaml.ScalarNode):
        return str(node.value)
    return _Other("a list" if isinstance(node, yaml.SequenceNode) else "a mapping")
