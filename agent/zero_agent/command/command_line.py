"""Parser of the command line of `zero-agent`, by the table in `flags.py`.

Each flag can be written with `-` or `_` between its words, abbreviated to any prefix that is unique
here or in torchrun, and set by torchrun's environment variable `PET_<FLAG>`; the command line wins
over the environment.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zero_agent.command.flags import FLAGS, GROUPS, METAVARS, OURS, Flag
from zero_contract.values import nearest
from zero_contract.version import add_version
from zero_orchestrator.arguments import variable_of
from zero_orchestrator.errors import SpecError

USAGE = "zero-agent [FLAG ...] SCRIPT [ARGUMENT ...]"

_SHORT = {flag.short: flag for flag in FLAGS.values() if flag.short}
_EXITS = ("-h", "--help", "--version")


@dataclass(frozen=True, kw_only=True)
class Line:
    """A parsed command line, with its errors."""

    args: argparse.Namespace
    """All flags with their values, and `script`, `arguments` and `variables`: the environment
    variable of each flag that was set by one. A flag that is wrong has its default."""
    wrong: tuple[str, ...]
    """The errors, one line each."""
    about: frozenset[str]
    """The flags that are wrong, or may be misread because of an error; may include `script`."""


@dataclass(frozen=True)
class _Wrong:
    lines: list[str] = field(default_factory=list)
    about: set[str] = field(default_factory=set)

    def add(self, line: str, *about: str) -> None:
        self.lines.append(line)
        self.about.update(about)


def read(argv: Sequence[str], environ: Mapping[str, str]) -> Line:
    """Parse a command line and collect its errors; errors name a flag as `--flag`."""
    flags, command, wrong = _split(argv)
    typed = {flag.partition("=")[0].removeprefix("--") for flag in flags}
    # `PET_MAX_RESTARTS=3` becomes `--max-restarts=3`; typed flags win over variables.
    variables: dict[str, str] = {}
    set_flags: list[str] = []
    for name in FLAGS:
        candidates = (variable_of(name), _TORCHRUNS.get(name, ""))
        variable = next((candidate for candidate in candidates if environ.get(candidate)), None)
        if variable is None or name in typed:
            continue
        variables[name], value = variable, environ[variable]
        if FLAGS[name].kind is not None:
            set_flags.append(f"--{name}={value}")
        elif value == "1":
            set_flags.append(f"--{name}")
        elif value != "0":
            wrong.add(f"{variable}={value}: write 1 for yes or 0 for no", name)
    parser, right = make_parser(), []
    # Each by itself: argparse stops at the first error, which must not hide the next one.
    for flag in (*set_flags, *flags):
        try:
            parser.parse_args([flag])
            right.append(flag)
        except SpecError as error:
            wrong.add(str(error), flag.partition("=")[0].removeprefix("--"))
    # All that are right together: what is not given has its default.
    args = parser.parse_args(right)
    args.variables = variables
    if not command and not args.preflight and not wrong.lines:
        wrong.add(f"no script is given; write {USAGE}; --help lists the flags", "script")
    args.script, args.arguments = command[0] if command else "", command[1:]
    # Without a program there is nothing that the checks of `mistakes.py` could find about it.
    about = wrong.about if command else {*wrong.about, "script"}
    return Line(args=args, wrong=tuple(wrong.lines), about=frozenset(about))


def _split(argv: Sequence[str]) -> tuple[list[str], list[str], _Wrong]:
    """Split a command line into its flags, as `--name=value`, the program, and the errors."""
    flags: list[str] = []
    wrong = _Wrong()
    rest = list(argv)
    # Up to the script: what follows is the script's, even if it looks like a flag.
    while rest and rest[0].startswith("-") and rest[0] != "-":
        token = rest.pop(0)
        if token == "--":
            break
        name, equals, value = token.partition("=")
        if not token.startswith("--") and len(name) > 2:  # `-t3`
            name, equals, value = token[:2], "", token[2:]
        if name in _EXITS:
            flags.append(name)
            continue
        flag, problem = _find(name)
        if problem:
            # The program may be misread as well, if the guess below is wrong.
            wrong.add(problem, "script", *([flag.name] if flag is not None else []))
            # Whether it has a value is a guess, by the nearest flag that exists.
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
    """`--name=value` of a flag, whose value may be the next argument, `rest[0]`; or an error."""
    if flag.kind is None:
        problem = f"{token}: a switch; write it without a value" if value else ""
        return f"--{flag.name}", problem
    if value:
        return f"--{flag.name}={value.removeprefix('=')}", ""
    if not rest:
        return "", f"{token}: a value must follow: {flag.help}"
    return f"--{flag.name}={rest.pop(0)}", ""


def _find(name: str) -> tuple[Flag | None, str]:
    """A flag by its name or a unique prefix; or an error, with the flag that was probably meant."""
    if name in _SHORT:
        return _SHORT[name], ""
    words = name.removeprefix("--").replace("_", "-")
    if words in FLAGS and name.startswith("--"):
        return FLAGS[words], ""
    fitting = [flag for flag in FLAGS if name.startswith("--") and flag.startswith(words)]
    # A prefix that torchrun takes for one flag means the same here: scripts in use have such ones.
    for these in (fitting, [flag for flag in fitting if flag not in OURS]):
        if len(these) == 1:
            return FLAGS[these[0]], ""
    if fitting:
        choice = ", ".join(f"--{flag}" for flag in fitting)
        return FLAGS[fitting[0]], f"{name}: could be any of {choice}"
    near = _OTHER_LAUNCHERS.get(words) or nearest(words, FLAGS)
    remedy = f"did you mean --{near}?" if near else "--help lists the flags"
    meant = FLAGS[near] if near else None
    return meant, f"{name}: there is no such flag; {_ELSEWHERE.get(words, remedy)}"


_OTHER_LAUNCHERS = {
    "bind-cores-to-rank": "numa-binding",
    "machine-rank": "node-rank",
    "main-process-ip": "master-addr",
    "main-process-port": "master-port",
    "num-gpus": "nproc-per-node",
    "num-machines": "nnodes",
    "num-nodes": "nnodes",
    "num-processes": "nproc-per-node",
}
"""A flag of the launchers of DeepSpeed and accelerate -> the flag here."""
_HOSTFILE = "zero-ctl launch has it, which starts an agent on every host of a hostfile"
_ELSEWHERE = {
    "config-file": "give its values to the Accelerator or to TrainingArguments in the script",
    "exclude": _HOSTFILE,
    "hostfile": _HOSTFILE,
    "include": _HOSTFILE,
    "mixed-precision": "give it to the Accelerator or to TrainingArguments in the script",
    "no-local-rank": "leave it out: LOCAL_RANK is in the environment, and is no argument",
    "use-env": "leave it out: LOCAL_RANK is in the environment, and is no argument",
}
"""A flag of another launcher that has no counterpart here -> what to do."""
_TORCHRUNS = {"health-port": "TORCHELASTIC_HEALTH_CHECK_PORT"}
"""Other variables of torchrun's agent, by the flag that they set here."""


class _Parser(argparse.ArgumentParser):
    """Raises SpecError instead of printing the usage and exiting."""

    def error(self, message: str) -> Any:
        raise SpecError(message.removeprefix("argument "))


def make_parser() -> argparse.ArgumentParser:
    """The command line of `zero-agent`."""
    parser = _Parser(
        prog="zero-agent",
        usage=USAGE,
        description="Run a training script on this node, elastically: nodes come and go, "
        "the job continues.",
        epilog="A flag may be written with - or _, abbreviated, or set as PET_<FLAG> in the "
        "environment. Exit codes: 0 job done, 2 wrong usage, 3 etcd out of reach, 4 too few nodes, "
        "5 job stopped, 6 node drained, 7 job failed without progress, 8 node unhealthy, 9 another "
        "specification or version than the job's, 70 internal error of this agent, 91 job failed, "
        "128+N ended by signal N. docs/exit-codes.md has the details.",
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34),
    )
    add_version(parser)
    for title, flags in GROUPS.items():
        group = parser.add_argument_group(title)
        for flag in flags:
            names = [name for name in (flag.short, f"--{flag.name}") if name]
            if flag.kind is None:
                group.add_argument(*names, action="store_true", help=flag.help)
                continue
            usual = METAVARS.get(flag.kind, flag.name.rpartition("-")[2].upper())
            group.add_argument(
                *names,
                type=flag.kind,
                default=flag.default,
                choices=flag.choices,
                metavar=flag.metavar or usual,
                help=flag.help,
            )
    return parser
