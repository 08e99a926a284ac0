"""`zero-agent`: flags, environment and defaults into one `AgentConfig`, and the agent run.

Every flag can be written with `-` or `_` between its words and set by torchrun's environment
variable `PET_<FLAG>`; a flag wins over the environment.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from zero_agent import local_etcd
from zero_agent.agent import Agent
from zero_agent.config import AgentConfig, AgentExit, AgentFailed
from zero_agent.network import address_towards
from zero_agent.worker_main import Program
from zero_orchestrator.clock import SystemClock
from zero_orchestrator.errors import SpecError, StoreError, ZeroError
from zero_orchestrator.rounds import Timing
from zero_orchestrator.runs import command_name, current_run
from zero_orchestrator.spec import JobSpec, check_job_name, parse_nnodes

log = logging.getLogger("zero")

SHARED_ENDPOINT = "127.0.0.1:2379"
"""etcd's own port: where agents without an endpoint meet on one machine."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="zero-agent",
        description="Run a training script on this node, elastically: nodes come and go, "
        "the job goes on.",
        epilog="Exit codes: 0 done, 1 job failed, 2 wrong usage, 3 etcd out of reach, "
        "4 too few nodes, 128+N ended by signal N.",
    )

    def flag(name: str, **options: Any) -> None:
        dest = name.replace("-", "_")
        value = os.environ.get(f"PET_{dest.upper()}")
        if value is not None:
            is_switch = options.get("action") == "store_true"
            options["default"] = value == "1" if is_switch else value
        spellings = dict.fromkeys((f"--{name}", f"--{dest}"))
        parser.add_argument(*spellings, **options)

    flag("nnodes", default="1:1", metavar="MIN:MAX", help="how many nodes; 4, or 1:4 (1:1)")
    flag("nproc-per-node", default="1", help="workers on this node: a number, auto, cpu, gpu (1)")
    flag("max-restarts", type=int, default=0, help="failures the whole job may survive (0)")
    flag("rdzv-endpoint", default="", metavar="HOST:PORT[,...]", help="etcd (one on this machine)")
    flag("rdzv-id", default="", help="the job's name (derived from the command)")
    flag("standalone", action="store_true", help="one node with an etcd of its own")
    flag("node-id", default="", help="this node's name (host name and random characters)")
    flag("local-addr", default="", help="this node's address (the one that routes to etcd)")
    flag("log-dir", type=Path, help="keep the workers' output and the job's events here")
    flag("shutdown-timeout", type=float, default=30.0, help="seconds from SIGTERM to SIGKILL (30)")
    flag("join-timeout", type=float, default=600.0, help="seconds to wait for nodes (600)")
    flag("etcd-grace", type=float, default=600.0, help="seconds to go on without etcd (600)")
    flag("cold-start", action="store_true", help="a fresh interpreter for each worker, no fork")
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module's name")
    parser.add_argument("script", help="the program each worker runs")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="and its arguments")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """The console script."""
    args = _parser().parse_args(argv)
    _set_up_logging()
    try:
        code = _run(args)
    except AgentFailed as error:
        log.error("%s", error)
        code = error.code
    except StoreError as error:
        log.error("%s. Is etcd running there? --rdzv-endpoint names it", error)
        code = AgentExit.NO_STORE
    except ZeroError as error:
        log.error("%s", error)
        code = AgentExit.USAGE
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    sys.exit(code)


def _set_up_logging() -> None:
    logging.raiseExceptions = False  # a closed terminal must not end a job
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("[zero %(asctime)s] %(message)s", "%H:%M:%S"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)


def _run(args: argparse.Namespace) -> int:
    spec, program, slots = _job_spec(args), _program(args), _slots(args.nproc_per_node)
    with _endpoint(args) as endpoints:
        config = AgentConfig(
            spec=spec,
            program=program,
            slots=slots,
            job=check_job_name(args.rdzv_id) if args.rdzv_id else None,
            node_id=args.node_id or f"{socket.gethostname()}-{secrets.token_hex(2)}",
            endpoints=endpoints,
            address=args.local_addr or _address(endpoints),
            timing=Timing(),
            log_dir=args.log_dir,
            preload=() if args.cold_start else AgentConfig.preload,
            shutdown_timeout_s=args.shutdown_timeout,
            join_timeout_s=args.join_timeout,
            etcd_grace_s=args.etcd_grace,
        )
        return _take_part(config)


def _take_part(config: AgentConfig) -> int:
    """Run the agent; without a job name, in the current run of this command."""
    from zero_orchestrator.etcd import EtcdStore  # gRPC: not needed to refuse a wrong flag

    with contextlib.closing(EtcdStore(config.endpoints)) as store:
        while True:
            name = command_name(Path(config.program.target).stem, config.spec.command)
            job = config.job or current_run(store, name)
            agent = Agent(config, job, store, SystemClock(), os.environ)
            with _signals_to(agent.on_signal):
                code = agent.run()
            if config.job is None and agent.ended and not agent.took_part:
                continue  # that run ended between the look at it and the joining: start the next
            return code


def _address(endpoints: str) -> str:
    from zero_orchestrator.etcd_connection import parse_endpoints  # gRPC, as above

    return address_towards(parse_endpoints(endpoints)[0])


@contextlib.contextmanager
def _signals_to(handle: Callable[[int], None]) -> Iterator[None]:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = [signal.signal(number, lambda got, frame: handle(got)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@contextlib.contextmanager
def _endpoint(args: argparse.Namespace) -> Iterator[str]:
    """Where etcd is: named by the user, private to this agent, or shared on this machine."""
    if args.rdzv_endpoint and not args.standalone:
        yield args.rdzv_endpoint
    elif args.standalone or parse_nnodes(args.nnodes)[1] == 1:
        with local_etcd.private_server() as endpoint:
            yield endpoint
    else:
        yield local_etcd.shared_server(SHARED_ENDPOINT)


def _job_spec(args: argparse.Namespace) -> JobSpec:
    low, high = parse_nnodes(args.nnodes)
    if args.standalone and high > 1:
        raise SpecError(
            f"--standalone with --nnodes={args.nnodes}: a standalone job has one node; "
            "leave out --standalone, the agents of one machine find each other without it"
        )
    where = args.script if args.module else str(Path(args.script).resolve())
    return JobSpec(
        min_nodes=low,
        max_nodes=high,
        max_restarts=args.max_restarts,
        command=(where, *args.arguments),
    )


def _program(args: argparse.Namespace) -> Program:
    target = args.script
    if args.module:
        with contextlib.suppress(ModuleNotFoundError):
            sys.path.insert(0, os.getcwd())
            if find_spec(target) is not None:
                return _as_program(args, target)
        raise SpecError(f"-m {target}: there is no such module; give its full dotted name")
    if not Path(target).is_file():
        raise SpecError(f"{target}: there is no such script; give its path, or -m for a module")
    return _as_program(args, str(Path(target)))


def _as_program(args: argparse.Namespace, target: str) -> Program:
    return Program(
        target=target, is_module=args.module, arguments=args.arguments, cold=args.cold_start
    )


def _slots(text: str) -> int:
    """`--nproc-per-node`: a number, or what the machine has."""
    gpus = _gpus() if text in {"auto", "gpu"} else 0
    cpus = len(os.sched_getaffinity(0))
    by_name = {"auto": gpus or cpus, "cpu": cpus, "gpu": gpus}
    if text == "gpu" and not gpus:
        raise SpecError("--nproc-per-node=gpu: torch sees no GPU here; use cpu or a number")
    if text in by_name:
        return by_name[text]
    if not text.isdecimal() or int(text) < 1:
        raise SpecError(f"--nproc-per-node={text}: write a number from 1, or auto, cpu, gpu")
    return int(text)


def _gpus() -> int:
    """GPUs that torch can use; asked in another process, since the agent never imports torch."""
    if not list(Path("/dev").glob("nvidia[0-9]*")):
        return 0
    question = "import torch; print(torch.cuda.device_count())"
    answer = subprocess.run(
        [sys.executable, "-c", question], capture_output=True, text=True, timeout=120, check=False
    )
    return int(answer.stdout) if answer.stdout.strip().isdecimal() else 0
