"""What each worker of a round is started with: its environment, its files, its CPUs.

Who calls it: the crew, when a round begins.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path

from zero_agent.config import AgentConfig, AgentFailed
from zero_agent.workers.exits import fresh_error_file
from zero_agent.workers.streams import Std
from zero_agent.workers.worker_env import Place, own_device, places, worker_env
from zero_agent.workers.workers import Order
from zero_contract.exit_codes import AgentExit
from zero_orchestrator.membership.job_state import Node, Snapshot


class Orders:
    """Writes the orders of one agent."""

    def __init__(
        self,
        config: AgentConfig,
        job: str,
        log_dir: Path,
        environ: Mapping[str, str],
        socket_path: str,
    ) -> None:
        """Nothing is made before a round begins.

        Args:
            config: Of the agent.
            job: The job's name.
            log_dir: Below it the workers leave their error files, and their output if it is kept.
            environ: What the workers inherit.
            socket_path: Where they reach the agent.
        """
        self._config = config
        self._job = job
        self._run_dir = log_dir / f"{job}_{secrets.token_hex(4)}"
        self._environ = environ
        self._socket_path = socket_path

    def of(self, job: Snapshot, node: Node, secret: str) -> list[Order]:
        """The orders of a round's workers on this node, in local order, given the job's secret.

        Raises:
            AgentFailed: There is no directory to be had for their files.
        """
        return [self._order(job, node, place, secret) for place in places(job, node)]

    def directory(self, job: Snapshot) -> Path:
        """Of this round's files, where torchrun has them; rounds without a new restart share it.

        Each agent process has a directory of its own, so that none writes over what another left.
        """
        return self._run_dir / f"attempt_{job.members.restarts}"

    def pulses(self, job: Snapshot, node: Node) -> dict[int, Path]:
        """Where each of these workers may show its pulse, by rank."""
        return self._files("heartbeat", job, node)

    def askings(self, job: Snapshot, node: Node) -> dict[int, Path]:
        """Where each of these workers may look whether it is to leave, by rank."""
        return self._files("leave", job, node)

    def _files(self, kind: str, job: Snapshot, node: Node) -> dict[int, Path]:
        return {place.rank: self._file(kind, job.n, place.rank) for place in places(job, node)}

    def _file(self, kind: str, n: int, rank: int) -> Path:
        """Beside the socket: that is a local disk, wherever the logs go."""
        return Path(self._socket_path).with_name(f"{kind}-{n}-{rank}")

    def _order(self, job: Snapshot, node: Node, place: Place, secret: str) -> Order:
        config, directory = self._config, self.directory(job)
        env = worker_env(
            job,
            node,
            place,
            name=self._job,
            socket_path=self._socket_path,
            error_file=str(_error_file(directory / str(place.local_rank))),
            heartbeat_file=str(self._file("heartbeat", job.n, place.rank)),
            leave_file=str(self._file("leave", job.n, place.rank)),
            secret=secret,
        )
        if config.advertised and job.members.index(node) == 0:
            # This node hosts the round's store; NAT need not lead back from behind itself.
            env["MASTER_ADDR"] = config.address
        if config.virtual_local_rank:
            env |= own_device(self._environ, place.local_rank)
        out, err = (
            config.streams.route(std, directory, place.rank, place.local_rank, node.role)
            for std in (Std.OUT, Std.ERR)
        )
        return Order(
            rank=place.rank,
            local_rank=place.local_rank,
            env=env,
            out=out,
            err=err,
            cpus=config.cpus[place.local_rank] if config.cpus else (),
        )


def _error_file(own: Path) -> Path:
    try:
        own.mkdir(parents=True, exist_ok=True)
        return fresh_error_file(own)
    except OSError as error:
        raise AgentFailed(
            AgentExit.UNFIT,
            f"{own}: {error.strerror}; the workers have nowhere to leave their errors. Make room "
            "there, or name another --log-dir",
        ) from error
