"""Ways to run a command on other hosts; each is a pure function from a plan to local commands.

`ssh` runs one command for each host, the others one for all hosts. A host's agent ends with
its connection. No value of a variable is in an argument, which every user of a machine can read.

Source of the commands: DeepSpeed's `multinode_runner.py` and each program's own manual.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from zero_agent.launch.plan import LaunchPlan
from zero_contract.exit_codes import LOST

CONNECT_TIMEOUT_S = 10
ALIVE_S = 5
"""Keepalive interval of ssh; a connection is closed after three intervals without an answer."""
READY = "zero-ctl launch: this host is ready for its variables"
"""The line with which a host requests the variables on its standard input."""

# The variables come over the standard input of ssh, as one line, in which %b expands the line
# breaks. The terminal is set to raw mode: otherwise it would echo the line, and cut it at 4096.
_READ = (
    f"terminal=$(stty -g) && stty raw -echo && echo {shlex.quote(READY)} && IFS= read -r given "
    f'&& stty "$terminal" && eval "$(printf %b "$given")" || exit {LOST};'
)


@dataclass(frozen=True, kw_only=True)
class Command:
    """One process on this machine that runs agents elsewhere."""

    where: str
    """The host, or all hosts."""
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment of the process."""
    stdin: str = field(default="", repr=False)
    """Written to its standard input when it has printed `READY`."""
    files: Mapping[Path, str] = field(default_factory=dict, repr=False)
    """Files, by path, that exist while it runs, and that only this user can read."""


@dataclass(frozen=True, kw_only=True)
class Remote:
    """The settings of the connections to hosts."""

    port: int | None = None
    arguments: tuple[str, ...] = ()
    """--launcher-args: further flags for the program that reaches the hosts."""
    pdsh_ssh_arguments: str = ""
    """The user's PDSH_SSH_ARGS_APPEND: further flags for the ssh that pdsh runs."""


Runner = Callable[[LaunchPlan, Remote], Sequence[Command]]


def _ssh(plan: LaunchPlan, remote: Remote) -> list[Command]:
    # -tt, a terminal: the agent gets SIGHUP when the connection is lost.
    options = ("-tt", *_ssh_options(), *(("-p", str(remote.port)) if remote.port else ()))
    reach = ("ssh", *options, *remote.arguments, "--")
    return [
        Command(
            where=host,
            argv=(*reach, host, plan.in_shell(_READ, host)),
            # One line for `read`; the shell's printf makes lines of it again.
            stdin=plan.exports(host).replace("\\", "\\\\").replace("\n", "\\n") + "\n",
        )
        for host in plan.hosts
    ]


def _ssh_options() -> tuple[str, ...]:
    options = {
        "BatchMode": "yes",  # a prompt is a failure at once: there is no user to answer it
        "ConnectTimeout": CONNECT_TIMEOUT_S,
        "ServerAliveInterval": ALIVE_S,
        "ServerAliveCountMax": 3,
        "LogLevel": "ERROR",
    }
    return tuple(f"-o{name}={value}" for name, value in options.items())


def _pdsh(plan: LaunchPlan, remote: Remote) -> list[Command]:
    port = f"-p {remote.port}" if remote.port else ""
    ssh = " ".join(filter(None, (*_ssh_options(), port, remote.pdsh_ssh_arguments)))
    # -S: its exit code is the largest of the hosts'. -f: by default it reaches 32 hosts at a time,
    # and the agents, which run until the job ends, would keep the others from beginning.
    argv = ("pdsh", "-S", "-f", "1024", *remote.arguments, "-w", ",".join(plan.hosts))
    env = {"PDSH_RCMD_TYPE": "ssh", "PDSH_SSH_ARGS_APPEND": ssh}
    # pdsh has no standard input: the hosts read the variables from the shared working directory.
    file = plan.directory / f".zero-launch-{plan.job}.env"
    path = shlex.quote(str(file))
    absent = shlex.quote(
        f"zero-ctl launch: {file} cannot be read here: with --launcher=pdsh all hosts share the "
        "working directory, with --launcher=ssh they need not"
    )
    line = plan.in_shell(f"[ -r {path} ] || {{ echo {absent} >&2; exit {LOST}; }}; . {path};")
    return [Command(where=_all(plan), argv=(*argv, line), env=env, files={file: plan.exports()})]


def _slurm(plan: LaunchPlan, remote: Remote) -> list[Command]:
    count = len(plan.hosts)
    argv = (
        *("srun", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1"),
        f"--nodelist={','.join(plan.hosts)}",
        "--kill-on-bad-exit=0",  # the failure of one task does not end the others
        # The variables are those of srun itself.
        *("--label", f"--chdir={plan.directory}", "--export=ALL"),
        *remote.arguments,
        *plan.agent(),
    )
    return [Command(where=_all(plan), argv=argv, env=plan.environment())]


def _all(plan: LaunchPlan) -> str:
    return ",".join(plan.hosts)


RUNNERS: Mapping[str, Runner] = {
    "ssh": _ssh,
    "pdsh": _pdsh,
    "slurm": _slurm,
}
