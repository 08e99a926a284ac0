"""`zero-agent`: from a command line to a running agent and its exit code.

`command_line.py` parses the flags, `mistakes.py` finds what is wrong with them, `resolve.py` makes
the configuration, `etcd_choice.py` finds the etcd. This module puts them together.
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
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from zero_agent.command import command_line, mistakes
from zero_agent.command.resolve import resolve, signals_to_handle
from zero_agent.errors import AgentFailed
from zero_agent.etcd import etcd_choice, local_etcd
from zero_agent.etcd.etcd_access import Access, Joining, clock_complaint, joined
from zero_agent.etcd.etcd_choice import Static, Way
from zero_agent.etcd.rdzv_conf import RdzvConf, check_backend, parse_rdzv_conf
from zero_agent.loop.agent import Agent
from zero_agent.loop.config import AgentConfig
from zero_agent.node import signals
from zero_agent.node.health_checks import allow_files, await_fit
from zero_agent.node.health_endpoint import Health, served
from zero_agent.node.network import address_towards
from zero_agent.workers import oom
from zero_agent.workers.exits import leave_error_file
from zero_agent.workers.output import tap as output
from zero_agent.workers.output.streams import Format
from zero_agent.workers.worker_main import ENV_ERROR_FILE, end_process
from zero_contract import notices
from zero_contract.clock import Stopwatch, SystemClock, process_age_s
from zero_contract.errors import ZeroError
from zero_contract.exit_codes import AgentExit
from zero_orchestrator.arguments import named_as_set
from zero_orchestrator.errors import SpecMismatch, StoreError, StoreReplaced
from zero_orchestrator.membership.keys import Keys
from zero_orchestrator.membership.runs import command_name, current_run, standing_run
from zero_orchestrator.observe.goodput import Use
from zero_orchestrator.store.kv import KeyValueStore

if TYPE_CHECKING:  # their imports take a while, and not every job needs them
    from zero_agent.etcd.own_etcd import Seat
    from zero_agent.etcd.own_members import MemberKeeper
    from zero_agent.etcd.port_proxy import PortProxy
    from zero_orchestrator.store.etcd.client import EtcdStore

log = logging.getLogger("zero")

_CODES = ((StoreError, AgentExit.NO_STORE), (SpecMismatch, AgentExit.MISMATCH))
"""Exit codes by class of error; any other ZeroError is a wrong command line."""
_FAILED = (AgentExit.JOB_FAILED, AgentExit.NO_PROGRESS)


def main(argv: Sequence[str] | None = None) -> None:
    """The console script."""
    if "_ARGCOMPLETE" in os.environ:  # a TAB in the user's shell; `zero-ctl completion` sets it up
        import argcomplete

        argcomplete.autocomplete(command_line.make_parser())
    logging.raiseExceptions = False  # a closed terminal must not end a job
    handler = output.Log()
    for logger in (log, logging.getLogger("zero_orchestrator")):  # whose lines look alike
        logger.addHandler(handler)
    log.setLevel(logging.INFO)
    _sign_lines("")
    # Every error becomes one message and an exit code.
    try:
        code = _run(sys.argv[1:] if argv is None else argv)
    except ZeroError as error:
        log.error("%s", error)
        if isinstance(error, AgentFailed):
            code = error.code
        else:
            codes = (code for kind, code in _CODES if isinstance(error, kind))
            code = next(codes, AgentExit.USAGE)
        # A launcher that starts this agent shows the file; a wrong command line is on its terminal.
        if code != AgentExit.USAGE:
            leave_error_file(os.environ.get(ENV_ERROR_FILE), str(error), "", code)
    except KeyboardInterrupt:  # before the handlers are installed, or after they are gone
        code = 128 + signal.SIGINT
    except Exception as error:
        log.exception("internal error: this agent ends, its job does not; start the agent again")
        code = AgentExit.CRASHED
        leave_error_file(os.environ.get(ENV_ERROR_FILE), f"internal error: {error!r}", "", code)
    finally:
        output.flush()
    end_process(code)  # threads of gRPC could hold up the end of an interpreter


def _sign_lines(node: str, form: Format = Format.TEXT) -> None:
    """Begin every log line with the time, and the node if the job has several; or write JSON."""
    signature = f" {node}" if node else ""
    text = "[zero %(asctime)s%(signature)s] %(message)s"
    formatter = logging.Formatter(text, "%H:%M:%S", defaults={"signature": signature})
    for handler in log.handlers:
        handler.setFormatter(output.JsonLines(node) if form is Format.JSON else formatter)


def _run(argv: Sequence[str]) -> int:
    line = command_line.read(argv, os.environ)
    # Before any error: it may have to be JSON.
    _sign_lines("", Format(line.args.log_format))
    with named_as_set(line.args.variables):
        mistakes.refuse(line, os.environ)
        args = line.args
        backend, conf = check_backend(args.rdzv_backend), parse_rdzv_conf(args.rdzv_conf)
        way, note = etcd_choice.choose(args)
        # Certificates are made of the join token where the user names none (`given`), and only for
        # an etcd that other machines reach (`wanted`).
        given, wanted = bool(args.etcd_ca or conf.ca), way in (Way.NAMED, Way.OWN, Way.STATIC)
        with joined(args, os.environ, given=given, wanted=wanted) as joining:
            if args.preflight:
                from zero_agent.command.preflight import preflight  # no agent needs its tables

                return preflight(args, conf)
            return _meet(args, conf, way, (backend, note), joining)


def _meet(
    args: argparse.Namespace, conf: RdzvConf, way: Way, notes: Sequence[str], joining: Joining
) -> int:
    """Find the other agents, and take part in the job."""
    backend, note = notes
    access = Access.of(args, conf, args.rdzv_endpoint)
    config, numbers = resolve(args, conf, os.environ), signals_to_handle(args.signals_to_handle)
    world = Static.of(args, config.join_timeout_s) if way is Way.STATIC else None
    # Before anything is started: etcd, the forkserver and the workers inherit the limit.
    allow_files(config.slots)
    backend = backend if way is Way.NAMED else ""
    threads = ""
    # As torchrun, in one line. The bits of weights on CPUs depend on this number (README.md).
    if config.slots > 1 and "OMP_NUM_THREADS" not in os.environ:
        threads = (
            f"OMP_NUM_THREADS is not set: each of the {config.slots} workers gets 1 thread; "
            "set it for more"
        )
    for sentence in filter(None, (backend, note, *conf.notes, threads, oom.group_note())):
        log.info("%s", sentence)
    # From here on there are servers to end, and files to remove.
    came: list[int] = []
    signals.install(partial(_end_start, came, numbers), numbers)
    with (
        served(args.health_host, args.health_port) as health,
        _endpoint(args, config, way, world, joining) as (where, proxy, seat),
    ):
        access = dataclasses.replace(access, endpoints=where)
        if seat is not None:
            found = _await_served(config, access, seat, numbers)
            access = dataclasses.replace(access, endpoints=found)
        if world is not None:
            # The id follows from the rank: each node waits until the one before it is registered.
            config = dataclasses.replace(
                config,
                job=config.job or "static",
                node_id=etcd_choice.static_id(world.rank),
                etcd_grace_s=etcd_choice.STATIC_GRACE_S
                if args.etcd_grace is None
                else args.etcd_grace,
            )
        if proxy is not None:
            config = dataclasses.replace(config, show_store=proxy.show_store)
        if args.node_id or config.spec.max_nodes > 1:
            _sign_lines(config.node_id, config.streams.format)
        # This etcd ends with this node.
        ends_here = way is Way.PRIVATE or (world is not None and world.rank == 0)
        part = partial(
            _take_part,
            numbers=numbers,
            came=came,
            world=world,
            health=health,
            ends_here=ends_here,
        )
        try:
            return _in_store(args, way, access, config, seat, numbers, part)
        finally:  # the rest is short, and no signal may change the exit code any more
            signals.ignore(numbers)


def _in_store(
    args: argparse.Namespace,
    way: Way,
    access: Access,
    config: AgentConfig,
    seat: Seat | None,
    numbers: Sequence[signal.Signals],
    take_part: Callable[[AgentConfig, EtcdStore, MemberKeeper | None], int],
) -> int:
    """Take part in the job at its etcd, and in those that follow it if it is lost for good."""
    while True:
        keeper: MemberKeeper | None = None
        try:
            with access.store() as store:
                if way is Way.NAMED:
                    _await_etcd(args, access, store, numbers)
                # Not before etcd answers: until its name resolves, the route to it is unknown.
                address = config.address or address_towards(access.first)
                config = dataclasses.replace(config, address=address)
                with _keeper(seat, store, config) as keeper:
                    code = take_part(config, store, keeper)
                    signals.ignore(numbers)  # what is left is short, and its code is decided
                    return code
        except (AgentFailed, StoreReplaced) as error:
            # Only an etcd of the job's own has a successor; any other one is the user's to mend.
            if keeper is None:
                raise
            access = dataclasses.replace(access, endpoints=_go_on(keeper, access, error))
            # Not another run of the same command, if this one has ended there meanwhile.
            config = dataclasses.replace(config, job=keeper.job)


@contextlib.contextmanager
def _endpoint(
    args: argparse.Namespace, config: AgentConfig, way: Way, world: Static | None, joining: Joining
) -> Iterator[tuple[str, PortProxy | None, Seat | None]]:
    """The endpoint of etcd, which serves in this context; the port of node 0; this agent's seat."""
    if world is not None:
        with etcd_choice.static_server(world, joining) as found:
            yield *found, None
    elif way is Way.OWN:
        from zero_agent.etcd.own_etcd import own_server

        with own_server(
            etcd_choice.endpoints_of(args.rdzv_endpoint),
            joining,
            job=config.job or "",
            node=config.node_id,
            ports=config.ports,
            keep_s=config.etcd_grace_s,
        ) as seat:
            yield ",".join(seat.known), None, seat
    elif way is Way.PRIVATE:
        with etcd_choice.own_port(args) as proxy, local_etcd.private_server() as endpoint:
            yield endpoint, proxy, None
    elif way is Way.SHARED:
        yield local_etcd.shared_server(etcd_choice.SHARED_ENDPOINT), None, None
    else:
        yield args.rdzv_endpoint, None, None


def _await_etcd(
    args: argparse.Namespace, access: Access, store: EtcdStore, numbers: Sequence[signal.Signals]
) -> None:
    """Return when the etcd that the user has named answers, within --etcd-wait."""
    question = Keys(args.rdzv_id).round  # a key of this job: the login may not allow others

    def look_at_it() -> None:
        if wrong := clock_complaint(access.clock_offset_s()):
            log.warning("%s", wrong)
        store.warn_of_versions()

    _until_signal(lambda: access.await_answer(lambda: store.get(question), args.etcd_wait), numbers)
    # Warnings only: no start waits for them.
    threading.Thread(target=look_at_it, daemon=True).start()


def _await_served(
    config: AgentConfig, access: Access, seat: Seat, numbers: Sequence[signal.Signals]
) -> str:
    """The endpoints of the job's own etcd, once somebody serves it, within --join-timeout."""
    found: list[str] = []
    wait_s = config.join_timeout_s
    ask = lambda: found.extend(seat.answering())  # noqa: E731
    _until_signal(lambda: access.await_answer(ask, wait_s, "--join-timeout"), numbers)
    return ",".join(found)


@contextlib.contextmanager
def _keeper(
    seat: Seat | None, store: EtcdStore, config: AgentConfig
) -> Iterator[MemberKeeper | None]:
    """The keeper of this agent's member, if the etcd is the job's own."""
    if seat is None:
        yield None
        return
    from zero_agent.etcd.own_members import MemberKeeper

    with contextlib.closing(MemberKeeper(seat, store.sibling(), config.node_id)) as keeper:
        yield keeper


def _go_on(keeper: MemberKeeper, access: Access, error: AgentFailed | StoreReplaced) -> str:
    """The endpoints of the store with which the job goes on, after the loss of its own.

    Raises:
        AgentFailed, StoreError: The job does not go on from here.
    """
    silent = isinstance(error, AgentFailed)
    if isinstance(error, AgentFailed) and error.code != AgentExit.NO_STORE:
        raise error  # not for lack of a store: a new one would not help
    # A node whose store still answered has been replaced: it may follow, and begin none itself.
    log.warning("%s", error)
    try:
        return keeper.go_on(access, begins=silent)
    except ZeroError as why:
        raise AgentFailed(AgentExit.NO_STORE, f"{error}; {why}") from why


def _serve(keeper: MemberKeeper | None, agent: Agent, config: AgentConfig, job: str) -> None:
    """Keep this node's member of the job's own etcd, if it has one, while the agent runs."""
    if keeper is not None:
        agent.holds, agent.replaced = keeper.holds, keeper.replaced
        host = config.advertised or config.address
        keeper.serve(job, host, config.address, agent.tell_of_member)


def _until_signal(wait: Callable[[], None], numbers: Sequence[signal.Signals]) -> None:
    """Wait for etcd. Raises AgentFailed if a signal comes, and what the wait raises."""
    number = signals.call_until_signal(wait, numbers)
    if number is not None:
        name = signal.Signals(number).name
        why = f"{name}: etcd has not answered yet, this node has not joined"
        raise AgentFailed(128 + number, why)


def _end_start(came: list[int], numbers: Sequence[signal.Signals], number: int) -> NoReturn:
    """End, and clean up on the way out, on a signal that comes while no worker runs."""
    signals.ignore(numbers)
    # Python drops the exception if the signal comes within a `__del__`: `_take_part` looks here.
    came.append(number)
    log.error("%s: this node ends; no worker runs here", signal.Signals(number).name)
    raise SystemExit(128 + number)


def _runs_elsewhere(store: KeyValueStore, job: str | None, name: str) -> bool:
    """Whether another agent of the job is alive."""
    try:
        job = job or standing_run(store, name)
        return job is not None and bool(store.range(Keys(job).nodes, limit=1).items)
    except StoreError:  # unknown: an unhealthy node then waits for the longer of the two times
        return True


def _take_part(
    config: AgentConfig,
    store: EtcdStore,
    keeper: MemberKeeper | None,
    *,
    numbers: Sequence[signal.Signals],
    came: Sequence[int],
    world: Static | None,
    health: Health | None,
    ends_here: bool,
) -> int:
    """Run the agent; without a job name, in the current run of this command."""
    on_unhealthy = health.waits if health is not None else lambda why: None
    program = config.program
    name = command_name(program.target, config.spec.command, is_module=program.is_module)
    idle = Stopwatch(clock := SystemClock())

    def unhealthy(why: str) -> None:
        idle.start()
        on_unhealthy(why)

    await_fit(
        config.surroundings(os.environ),
        config.join_timeout_s,
        unhealthy,
        max_nodes=config.spec.max_nodes,
        others=partial(_runs_elsewhere, store, config.job, name),
    )
    idle_s = idle.elapsed_s or 0.0
    # The imports before `main` are time of this node as well.
    since_s = clock.now() - process_age_s()
    while True:
        job = config.job or current_run(store, name)
        if world is not None:
            etcd_choice.await_turn(store, job, world)
        # A connection of its own: no report may delay a transition of the job.
        with contextlib.closing(store.sibling()) as telemetry:
            spent_s = {Use.IDLE: idle_s, Use.STARTING: clock.now() - since_s - idle_s}
            before_ns = {use: round(1e9 * time_s) for use, time_s in spent_s.items() if time_s > 0}
            agent = Agent(
                config, job, store, clock, os.environ, telemetry=telemetry, before_ns=before_ns
            )
            _serve(keeper, agent, config, job)
            if health is not None:
                health.watch(lambda agent=agent: agent.status, agent.metrics)  # type: ignore[misc]
            notices.watch(agent.on_notice, os.environ)
            with signals.installed(agent.on_signal, numbers):
                # Python may have dropped the exception of `_end_start`, and not its record.
                for number in came:
                    agent.on_signal(number)
                code = agent.run()
            idle_s, since_s = 0.0, clock.now()
        if config.job is None and agent.ended and not agent.took_part:
            continue  # that run ended before this agent joined it: start the next
        # An etcd that ends with this node ends after the others have read how the job ended.
        if keeper is not None:
            keeper.see_off(agent.ended)
        elif ends_here:
            etcd_choice.see_off(store, job)
        if code in _FAILED and (cause := agent.root_cause):
            leave_error_file(os.environ.get(ENV_ERROR_FILE), cause.summary, cause.traceback, code)
        return code
