"""`zero-agent`: what was typed, into a running agent, into an exit code.

`command_line.py` reads it, `mistakes.py` says what is wrong, `resolve.py` what it means,
`meeting.py` where the agents meet; here they are put together, and whatever goes wrong becomes one
message and a code.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from zero_agent.command import command_line, mistakes
from zero_agent.command.preflight import preflight
from zero_agent.command.resolve import resolve, signals_to_handle
from zero_agent.errors import AgentFailed
from zero_agent.etcd import etcd_clock, local_etcd, meeting
from zero_agent.etcd.etcd_access import Access, check_is_etcd
from zero_agent.etcd.front import Front
from zero_agent.etcd.joining import Joining, joined
from zero_agent.etcd.meeting import Static, Way
from zero_agent.etcd.rdzv_conf import RdzvConf, check_backend, parse_rdzv_conf
from zero_agent.loop.agent import Agent
from zero_agent.loop.config import AgentConfig
from zero_agent.node import signals
from zero_agent.node.health_checks import await_fit
from zero_agent.node.health_endpoint import Health, served
from zero_agent.node.network import address_towards
from zero_agent.workers import oom, output
from zero_agent.workers.exits import leave_error_file
from zero_agent.workers.worker_main import ENV_ERROR_FILE
from zero_contract.clock import SystemClock
from zero_contract.errors import ZeroError
from zero_contract.exit_codes import AgentExit
from zero_orchestrator.arguments import named_as_set
from zero_orchestrator.errors import SpecMismatch, StoreError
from zero_orchestrator.membership.keys import Keys
from zero_orchestrator.membership.runs import command_name, current_run, standing_run
from zero_orchestrator.store.kv import KeyValueStore

if TYPE_CHECKING:
    from zero_orchestrator.store.etcd.client import EtcdStore

log = logging.getLogger("zero")

_CODES = ((StoreError, AgentExit.NO_STORE), (SpecMismatch, AgentExit.MISMATCH))
"""Of errors that are not a wrong command line."""
_FAILED = (AgentExit.JOB_FAILED, AgentExit.NO_PROGRESS)


def main(argv: Sequence[str] | None = None) -> None:
    """The console script."""
    logging.raiseExceptions = False  # a closed terminal must not end a job
    log.addHandler(output.Log())
    log.setLevel(logging.INFO)
    _sign_lines("")
    try:
        code = _run(sys.argv[1:] if argv is None else argv)
    except ZeroError as error:
        log.error("%s", error)
        code = _code_of(error)
        if code != AgentExit.USAGE:
            leave_error_file(os.environ.get(ENV_ERROR_FILE), str(error), "", code)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except Exception as error:
        log.exception("internal error: this agent ends, its job does not; start the agent again")
        code = AgentExit.CRASHED
        leave_error_file(os.environ.get(ENV_ERROR_FILE), f"internal error: {error!r}", "", code)
    finally:
        output.flush()
    sys.exit(code)


def _code_of(error: ZeroError) -> int:
    if isinstance(error, AgentFailed):
        return error.code
    return next((code for kind, code in _CODES if isinstance(error, kind)), AgentExit.USAGE)


def _sign_lines(node: str) -> None:
    """Begin every line with the time, and the node if its agent is one of several."""
    signature = f" {node}" if node else ""
    form = "[zero %(asctime)s%(signature)s] %(message)s"
    for handler in log.handlers:
        handler.setFormatter(logging.Formatter(form, "%H:%M:%S", defaults={"signature": signature}))


def _run(argv: Sequence[str]) -> int:
    line = command_line.read(argv, os.environ)
    with named_as_set(line.args.variables):
        mistakes.refuse(line, os.environ)
        return _obey(line.args)


def _obey(args: argparse.Namespace) -> int:
    backend, conf = check_backend(args.rdzv_backend), parse_rdzv_conf(args.rdzv_conf)
    way, note = meeting.choose(args)
    given, wanted = bool(args.etcd_ca or conf.ca), way in (Way.NAMED, Way.STATIC)
    with joined(args, os.environ, given=given, wanted=wanted) as joining:
        if args.preflight:
            return preflight(args, conf)
        return _meet(args, conf, way, (backend, note), joining)


def _meet(
    args: argparse.Namespace, conf: RdzvConf, way: Way, notes: Sequence[str], joining: Joining
) -> int:
    """Find the other agents, and take part."""
    backend, note = notes
    access = Access.of(args, conf, args.rdzv_endpoint)
    config, numbers = resolve(args, conf, os.environ), signals_to_handle(args.signals_to_handle)
    world = Static.of(args, config.join_timeout_s) if way is Way.STATIC else None
    backend = backend if way is Way.NAMED else ""
    for sentence in filter(None, (backend, note, *conf.notes, _threads(config), oom.group_note())):
        log.info("%s", sentence)
    came: list[int] = []
    signals.install(partial(_end_start, came, numbers), numbers)
    with (
        served(args.health_host, args.health_port) as health,
        _endpoint(args, way, world, joining) as (where, front),
    ):
        access = dataclasses.replace(access, endpoints=where)
        config = _placed(config, args, world)
        if front is not None:
            config = dataclasses.replace(config, show_store=front.show_store)
        if args.node_id or config.spec.max_nodes > 1:
            _sign_lines(config.node_id)
        with access.store() as store:
            if way is Way.NAMED:
                _await_etcd(args, access, store, numbers)
            # Only now: the route to a name that nobody knows yet is unknown as well.
            address = config.address or address_towards(access.first)
            config = dataclasses.replace(config, address=address)
            try:
                return _take_part(config, store, numbers, came, world, health)
            finally:  # what is left is short, and the exit code is known: no signal changes it
                signals.ignore(numbers)


def _threads(config: AgentConfig) -> str:
    """Say what torchrun says about threads, in one line."""
    if config.slots == 1 or "OMP_NUM_THREADS" in os.environ:
        return ""
    return (
        f"OMP_NUM_THREADS is not set: each of the {config.slots} workers gets 1 thread; "
        "set it for more"
    )


@contextlib.contextmanager
def _endpoint(
    args: argparse.Namespace, way: Way, world: Static | None, joining: Joining
) -> Iterator[tuple[str, Front | None]]:
    """Where etcd is, for as long as this agent needs it; and the port that others know here."""
    if world is not None:
        with meeting.static_server(world, joining) as found:
            yield found
    elif way is Way.PRIVATE:
        with meeting.own_port(args) as front, local_etcd.private_server() as endpoint:
            yield endpoint, front
    elif way is Way.SHARED:
        yield local_etcd.shared_server(meeting.SHARED_ENDPOINT), None
    else:
        yield args.rdzv_endpoint, None


def _await_etcd(
    args: argparse.Namespace,
    access: Access,
    store: KeyValueStore,
    numbers: Sequence[signal.Signals],
) -> None:
    """Return when the etcd that the user has named answers; a signal ends the wait."""
    question = Keys(args.rdzv_id).round  # a key of the job's, or the login may not allow it

    def ask() -> None:
        if not access.is_secure:
            check_is_etcd(args)
        store.get(question)

    number = signals.call_until_signal(lambda: access.await_answer(ask, args.etcd_wait), numbers)
    if number is not None:
        name = signal.Signals(number).name
        why = f"{name}: etcd has not answered yet, this node has not joined"
        raise AgentFailed(128 + number, why)
    threading.Thread(target=_compare_clocks, args=(access,), daemon=True).start()


def _compare_clocks(access: Access) -> None:
    if wrong := etcd_clock.complaint(etcd_clock.offset_s(access)):
        log.warning("%s", wrong)


def _end_start(came: list[int], numbers: Sequence[signal.Signals], number: int) -> NoReturn:
    """No worker runs; what this process has started or made goes on the way out.

    Args:
        came: Takes note of the signal: what is raised here is lost if it comes within a `__del__`.
        numbers: Are not heard on the way out, which is short.
        number: Of the signal.
    """
    signals.ignore(numbers)
    came.append(number)
    log.error("%s: this node ends; no worker runs here", signal.Signals(number).name)
    raise SystemExit(128 + number)


def _placed(config: AgentConfig, args: argparse.Namespace, world: Static | None) -> AgentConfig:
    """The configuration with this node's place in a fixed world, if it is in one."""
    if world is None:
        return config
    return dataclasses.replace(
        config,
        job=config.job or "static",
        node_id=meeting.static_id(world.rank),
        etcd_grace_s=meeting.STATIC_GRACE_S if args.etcd_grace is None else args.etcd_grace,
    )


def _runs_elsewhere(store: KeyValueStore, job: str | None, name: str) -> bool:
    """Whether another agent of the job is alive, as far as etcd can tell."""
    try:
        job = job or standing_run(store, name)
        return job is not None and bool(store.range(Keys(job).nodes, limit=1).items)
    except StoreError:
        return True


def _take_part(
    config: AgentConfig,
    store: EtcdStore,
    numbers: Sequence[signal.Signals],
    came: Sequence[int],
    world: Static | None,
    health: Health | None,
) -> int:
    """Run the agent; without a job name, in the current run of this command."""
    tell = health.waits if health is not None else lambda why: None
    target = config.program.target
    stem = target if config.program.is_module else Path(target).stem
    name = command_name(stem, config.spec.command)
    await_fit(
        config.surroundings(os.environ),
        config.join_timeout_s,
        tell,
        max_nodes=config.spec.max_nodes,
        others=partial(_runs_elsewhere, store, config.job, name),
    )
    while True:
        job = config.job or current_run(store, name)
        if world is not None:
            meeting.await_turn(store, job, world)
        with contextlib.closing(store.sibling()) as telemetry:
            agent = Agent(config, job, store, SystemClock(), os.environ, telemetry=telemetry)
            if health is not None:
                health.watch(lambda agent=agent: agent.status)  # type: ignore[misc]
            with signals.installed(agent.on_signal, numbers):
                for number in came:
                    agent.on_signal(number)
                code = agent.run()
        if config.job is None and agent.ended and not agent.took_part:
            continue  # that run ended between the look at it and the joining: start the next
        if world is not None and world.rank == 0:
            meeting.see_off(store, job)
        if code in _FAILED and (cause := agent.root_cause):
            leave_error_file(os.environ.get(ENV_ERROR_FILE), cause.summary, cause.traceback, code)
        return code
