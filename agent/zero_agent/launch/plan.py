"""The plan of a job on several hosts: one record, from which every runner makes its commands."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from zero_agent.launch.hosts import Hosts
from zero_contract.exit_codes import AgentExit
from zero_orchestrator.errors import SpecError

GATHER_S = 3
"""How long the first round waits for more hosts after the last that came, seconds."""


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """One job on several hosts."""

    hosts: Hosts
    job: str
    endpoint: str
    """The etcd where the agents meet, `HOST:PORT`."""
    program: tuple[str, ...]
    """The agent's last arguments: the script and the script's arguments."""
    min_nodes: int = 1
    max_restarts: int = 3
    agent_flags: tuple[str, ...] = ()
    """Further flags for every agent."""
    env: dict[str, str]
    python: str
    """The path of the interpreter, the same on all hosts."""
    directory: Path
    """The working directory of the agents, the same on all hosts."""

    def agent(self, host: str | None = None) -> list[str]:
        """The command of a host's agent; with None, one command for every host.

        Raises:
            SpecError: No single command fits every host, because their slots differ.
        """
        slots = len(self.hosts[host]) if host else len(self._same_slots())
        return [
            *(self.python, "-m", "zero_agent"),
            f"--nnodes={self.min_nodes}:{len(self.hosts)}",
            f"--nproc-per-node={slots}",
            f"--max-restarts={self.max_restarts}",
            f"--rdzv-endpoint={self.endpoint}",
            f"--rdzv-id={self.job}",
            # Connections to many hosts take their time: else the first round has some of them.
            f"--rdzv-conf=last_call_timeout={GATHER_S}",
            *((f"--node-id={host}",) if host else ()),
            *self.agent_flags,
            *self.program,
        ]

    def environment(self, host: str | None = None) -> dict[str, str]:
        """The variables of a host's agent; with None, those for every host."""
        slots = self.hosts[host] if host else self._same_slots()
        devices = ",".join(map(str, slots))
        return {**self.env, "CUDA_VISIBLE_DEVICES": devices}

    def exports(self, host: str | None = None) -> str:
        """The variables of a host's agent as shell commands; secrets may be among them."""
        variables = sorted(self.environment(host).items())
        return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables)

    def in_shell(self, begin: str, host: str | None = None) -> str:
        """The agent as one line for a POSIX shell of the host, or of every host.

        The shell runs the commands `begin` before it becomes the agent.
        """
        command = shlex.join(["/bin/sh", "-c", f'{begin} exec "$@"', "sh", *self.agent(host)])
        # The shell's own code must not look like the job's end.
        lacking = f"exit {AgentExit.UNHEALTHY:d}"
        return f"cd {shlex.quote(str(self.directory))} || {lacking}; exec {command}"

    def _same_slots(self) -> tuple[int, ...]:
        different = set(self.hosts.values())
        if len(different) > 1:
            raise SpecError(
                "this launcher runs the same command on every host, and their slots differ: "
                + ", ".join(f"{host}:{','.join(map(str, s))}" for host, s in self.hosts.items())
                + "; use --launcher=ssh, or --include the same slots of each"
            )
        return next(iter(different))
