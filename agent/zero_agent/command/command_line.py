"""A command line of `zero-agent`, read by the table in `flags.py`.

Each flag can be written with `-` or `_` between its words, shortened to any beginning that only
it has here or in torchrun, and set by torchrun's environment variable `PET_<FLAG>`; the command
line wins over the environment.

Must always hold: what follows the script belongs to the script, to the letter, whatever it looks
like.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zero_agent.command.flags import FLAGS, GROUPS, METAVARS, OURS, Flag
from zero_contract.values import nearest
from zero_orchestrator.arguments import named_as_set, variable_of
from zero_orchestrator.errors import SpecError

USAGE = "zero-agent [FLAG ...] SCRIPT [ARGUMENT ...]"

_SHORT = {flag.short: flag for flag in FLAGS.values() if flag.short}
_HELP = ("-h", "--help")


@dataclass(frozen=True, kw_only=True)
class Line:
    """A command line as far as it can be read."""

    args: argparse.Namespace
    """All flags with their values, and `script`, `arguments` and `variables`: which of the flags
    were set by which variable of the environment. A flag that is wrong has its default."""
    wrong: tuple[str, ...]
    """What is wrong, a line each."""
    about: frozenset[str]
    """The flags that are wrong, or may be others than they look; `script` may be among them."""


@dataclass(frozen=True)
class _Wrong:
    lines: list[str] = field(default_factory=list)
    about: set[str] = field(default_factory=set)

    def add(self, line: str, *about: str) -> None:
        self.lines.append(line)
        self.about.update(about)


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> argparse.Namespace:
    """The flags of a line, see `Line`.

    Raises:
        SpecError: Flags that do not exist, values they cannot have, or no script; all of the
            wrong ones are named, one a line.
    """
    line = read(argv, environ)
    with named_as_set(line.args.variables):
        if line.wrong:
            raise SpecError("\n".join(line.wrong))
    return line.args


def read(argv: Sequence[str], environ: Mapping[str, str]) -> Line:
    """What a command line says, and what is wrong with it by itself; flags are called `--flag`."""
    flags, command, wrong = _split(argv)
    typed = {flag.partition("=")[0].removeprefix("--") for flag in flags}
    variables = {name: it for name in FLAGS if name not in typed and (it := _set_by(name, environ))}
    args = _values([*_from_environment(variables, environ, wrong), *flags], wrong)
    args.variables = variables
    if not command and not args.preflight and not wrong.lines:
        wrong.add(f"no script is given; write {USAGE}; --help lists the flags", "script")
    args.script, args.arguments = command[0] if command else "", command[1:]
    about = wrong.about if command else {*wrong.about, "script"}
    return Line(args=args, wrong=tuple(wrong.lines), about=frozenset(about))


def _values(flags: Sequence[str], wrong: _Wrong) -> argparse.Namespace:
    """The values of flags that are written in full, `--name` or `--name=value` each."""
    parser, right = make_parser(), []
    for flag in flags:
        try:
            parser.parse_args([flag])
            right.append(flag)
        except SpecError as error:
            wrong.add(str(error), flag.partition("=")[0].removeprefix("--"))
    return parser.parse_args(right)


def _split(argv: Sequence[str]) -> tuple[list[str], list[str], _Wrong]:
    """The flags, written in full as `--name=value`; the program with its arguments; what is wrong.

    Whether a value follows a flag that does not exist is a guess, by the one that was meant.
    """
    flags: list[str] = []
    wrong = _Wrong()
    rest = list(argv)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        token = rest.pop(0)
        if token == "--":
            break
        name, equals, value = _taken_apart(token)
        if name in _HELP:
            flags.append(name)
            continue
        flag, problem = _find(name)
        if problem:
            wrong.add(problem, "script", *([flag.name] if flag is not None else []))
            if flag is not None and flag.kind is not None and not equals and rest:
                rest.pop(0)
        elif flag is not None:
            written, problem = _in_full(token, flag, equals + value, rest)
            if problem:
                wrong.add(problem, flag.name)
            else:
                flags.append(written)
    return flags, rest, wrong


def _in_full(token: str, flag: Flag, value: str, rest: list[str]) -> tuple[str, str]:
    """`--name=value` of a flag, whose value may be the first of the rest; or what is wrong."""
    if flag.kind is None:
        problem = f"{token}: a switch; write it without a value" if value else ""
        return f"--{flag.name}", problem
    if value:
        return f"--{flag.name}={value.removeprefix('=')}", ""
    if not rest:
        return "", f"{token}: a value must follow: {flag.help}"
    return f"--{flag.name}={rest.pop(0)}", ""


def _taken_apart(token: str) -> tuple[str, str, str]:
    """`--tee=3`, `-t=3` and `-t3` into name, `=` if there, and value."""
    name, equals, value = token.partition("=")
    if token.startswith("--") or len(name) == 2:
        return name, equals, value
    return token[:2], "", token[2:]


def _find(name: str) -> tuple[Flag | None, str]:
    """The flag of this name, in either spelling, or of this unique beginning of one.

    Otherwise what is wrong, with the flag that may have been meant.
    """
    if name in _SHORT:
        return _SHORT[name], ""
    words = name.removeprefix("--").replace("_", "-")
    if words in FLAGS and name.startswith("--"):
        return FLAGS[words], ""
    fitting = [flag for flag in FLAGS if name.startswith("--") and flag.startswith(words)]
    for these in (fitting, [flag for flag in fitting if flag not in OURS]):
        if len(these) == 1:
            return FLAGS[these[0]], ""
    if fitting:
        choice = ", ".join(f"--{flag}" for flag in fitting)
        return FLAGS[fitting[0]], f"{name}: could be any of {choice}"
    near = nearest(words, FLAGS)
    remedy = f"did you mean --{near}?" if near else "--help lists the flags"
    meant = FLAGS[near] if near else None
    return meant, f"{name}: there is no such flag; {remedy}"


def _set_by(name: str, environ: Mapping[str, str]) -> str | None:
    """The variable that sets a flag, if one does."""
    candidates = (variable_of(name), _TORCHRUNS.get(name, ""))
    return next((candidate for candidate in candidates if environ.get(candidate)), None)


_TORCHRUNS = {"health-port": "TORCHELASTIC_HEALTH_CHECK_PORT"}
"""Variables under which torchrun's agent looks for what is a flag here."""


def _from_environment(
    variables: Mapping[str, str], environ: Mapping[str, str], wrong: _Wrong
) -> list[str]:
    """`PET_MAX_RESTARTS=3` as `--max-restarts=3`; a switch that is neither 0 nor 1 is wrong."""
    found = []
    for name, variable in variables.items():
        value = environ[variable]
        if FLAGS[name].kind is not None:
            found.append(f"--{name}={value}")
        elif value == "1":
            found.append(f"--{name}")
        elif value != "0":
            wrong.add(f"{variable}={value}: write 1 for yes or 0 for no", name)
    return found


class _Parser(argparse.ArgumentParser):
    """Complains as the rest of us does: in one line, through the log."""

    def error(self, message: str) -> Any:
        raise SpecError(message.removeprefix("argument "))


def make_parser() -> argparse.ArgumentParser:
    """The command line of `zero-agent`."""
    parser = _Parser(
        prog="zero-agent",
        usage=USAGE,
        description="Run a training script on this node, elastically: nodes come and go, "
        "the job goes on.",
        epilog="A flag may be written with - or _, shortened, or set as PET_<FLAG> in the "
        "environment. Exit codes: 0 done, 1 job failed, 2 wrong usage, 3 etcd out of reach, "
        "4 too few nodes, 5 job stopped, 6 node drained, 7 no progress, 8 node not fit, "
        "128+N ended by signal N.",
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34),
    )
    for title, flags in GROUPS.items():
        group = parser.add_argument_group(title)
        for flag in flags:
            _add(group, flag)
    return parser


def _add(group: Any, flag: Flag) -> None:
    names = [name for name in (flag.short, f"--{flag.name}") if name]
    if flag.kind is None:
        group.add_argument(*names, action="store_true", help=flag.help)
        return
    group.add_argument(
        *names,
        type=flag.kind,
        default=flag.default,
        choices=flag.choices,
        metavar=flag.metavar or METAVARS.get(flag.kind, flag.name.rpartition("-")[2].upper()),
        help=flag.help,
    )
