"""From flags to an `AgentConfig`: what the command line means on this machine."""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from zero_agent.errors import AgentFailed
from zero_agent.etcd.rdzv_conf import RdzvConf
from zero_agent.loop.config import AgentConfig
from zero_agent.workers import numa
from zero_agent.workers.environment import own_device
from zero_agent.workers.output.streams import (
    PREFIX,
    Format,
    Std,
    Streams,
    parse_ranks,
    parse_selection,
)
from zero_agent.workers.worker_main import Program
from zero_contract.exit_codes import AgentExit
from zero_orchestrator.addresses import who
from zero_orchestrator.errors import SpecError
from zero_orchestrator.membership.ranks import SEPARATOR
from zero_orchestrator.membership.rounds import Timing
from zero_orchestrator.membership.spec import JobSpec, parse_nnodes

log = logging.getLogger("zero")

SHUTDOWN_TIMEOUT_S = 30.0  # torchrun's
SHORTEST_LEASE_S = 2  # etcd's, with its election timeout of 1 s
LONGEST_LEASE_S = 15  # of the default: a lost node costs all others as much time
NODES_PER_LEASE_S = 200
"""The default lease is one second longer for each of so many nodes: etcd has more to refresh."""
NO_FILES = Path(os.devnull)
"""--log-dir=/dev/null: output is shown and not kept, as with torchrun."""
DEVICES = Path("/dev")
COUNT_S = 120.0
"""The longest time in which torch is imported and counts the GPUs."""
_UNCATCHABLE = (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD)


def resolve(args: argparse.Namespace, conf: RdzvConf, environ: Mapping[str, str]) -> AgentConfig:
    """The whole configuration; `address` may be empty, since only the endpoint of etcd decides it.

    Raises:
        SpecError: A flag is wrong.
        AgentFailed: This node has no GPU, and --nproc-per-node=gpu.
    """
    program = program_of(args, environ)
    streams = _streams(args, environ)
    spec = _spec(args)
    usual = Timing()
    # Each node refreshes its lease three times in that time, so a large job needs longer leases. A
    # small one does not: a lost node that nothing else betrays is found when its lease ends.
    usual_s = min(AgentConfig.lease_ttl_s + spec.max_nodes // NODES_PER_LEASE_S, LONGEST_LEASE_S)
    lease_ttl_s = int(args.lease_ttl or conf.lease_ttl_s or usual_s)
    slots = count_slots(args.nproc_per_node)
    if args.virtual_local_rank:
        own_device(environ, slots - 1)  # an error is raised now rather than in the workers
    log_dir = None if args.log_dir == NO_FILES else args.log_dir
    if log_dir is None and streams.needs_files:
        # The prefix is torchrun's: users look there.
        log_dir = Path(tempfile.mkdtemp(prefix="torchelastic_"))
    make_log_dir(log_dir)
    return AgentConfig(
        spec=spec,
        program=program,
        slots=slots,
        job=args.rdzv_id or None,
        # Several agents of one machine must differ.
        node_id=args.node_id or f"{socket.gethostname()}-{secrets.token_hex(2)}",
        host=args.machine or ("" if args.node_id else socket.gethostname()),
        topology=topology_of(environ),
        address=args.local_addr,
        advertised=args.advertise_addr,
        ports=args.port_range,
        # A lost peer shows within the time to live of its lease, and a moment.
        timing=Timing(
            settle_s=_first(conf.settle_s, usual.settle_s),
            grow_every_s=args.grow_every,
            symptom_patience_s=max(usual.symptom_patience_s, 2.0 * lease_ttl_s),
            return_within_s=max(usual.return_within_s, lease_ttl_s + 1.0),
        ),
        role=args.role,
        gpus=wants_gpus(args),
        health_check=args.health_check,
        health_check_timeout_s=args.health_check_timeout,
        ram_budget_bytes=args.ram_budget,
        lease_ttl_s=lease_ttl_s,
        log_dir=log_dir,
        streams=streams,
        cpus=_cpus(args.numa_binding, slots, environ),
        virtual_local_rank=args.virtual_local_rank,
        preload=preload_of(args.preload, program),
        shutdown_timeout_s=shutdown_timeout_s(args.shutdown_timeout, environ),
        hang=args.hang_timeout,
        join_timeout_s=_first(args.join_timeout, conf.join_timeout_s, AgentConfig.join_timeout_s),
        stop_exit_code=args.stop_exit_code,
        etcd_grace_s=_first(args.etcd_grace, AgentConfig.etcd_grace_s),
    )


def topology_of(environ: Mapping[str, str]) -> str:
    """Where this node is in the network, as `Node.topology`; empty: nobody says."""
    address = environ.get("SLURM_TOPOLOGY_ADDR", "")
    # The last part is the node, whose name may have dots.
    depth = environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").count(SEPARATOR)
    return environ.get("ZERO_TOPOLOGY") or SEPARATOR.join(address.split(SEPARATOR)[:depth])


def _spec(args: argparse.Namespace) -> JobSpec:
    """What all agents of the job must agree on."""
    low, high = parse_nnodes(args.nnodes)
    # Agents with other working directories have the same script.
    is_file = Path(args.script).is_file() and not args.module
    where = str(Path(args.script).resolve()) if is_file else args.script
    return JobSpec(
        min_nodes=low,
        max_nodes=high,
        node_unit=args.node_unit,
        max_restarts=args.max_restarts,
        refill_after_steps=args.refill_after_steps,
        max_restarts_without_progress=args.max_restarts_without_progress,
        exclude_after=args.exclude_after,
        exclude_for_s=math.ceil(args.exclude_for),
        command=(where, *args.arguments),
        owner=who(),
    )


def check_lease_ttl(ttl_s: int | None) -> None:
    """Raise SpecError if etcd has no such leases."""
    if ttl_s is not None and ttl_s < SHORTEST_LEASE_S:
        raise SpecError(
            f"--lease-ttl={ttl_s}: etcd has no shorter leases than {SHORTEST_LEASE_S} s"
        )


def signals_to_handle(text: str) -> list[signal.Signals]:
    """`SIGTERM,SIGUSR1` as signals.

    Raises:
        SpecError: There is no such signal, or no process can handle it.
    """
    found = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        number = signal.Signals.__members__.get(name)
        if number is None or number in _UNCATCHABLE:
            raise SpecError(
                f"--signals-to-handle={text}: {name} is not a signal that can be handled; write "
                "names such as SIGTERM,SIGUSR1"
            )
        # Who types `nohup` wants this node to outlive its terminal.
        if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            found.append(number)
    return found


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)


def shutdown_timeout_s(flag_s: float | None, environ: Mapping[str, str]) -> float:
    """The flag, or torchelastic's environment variable, or the default.

    Raises:
        SpecError: The variable is not a number.
    """
    name = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    try:
        from_environment = float(environ[name]) if environ.get(name) else None
    except ValueError:
        raise SpecError(f"{name}={environ[name]}: write seconds, such as 30") from None
    return _first(flag_s, from_environment, SHUTDOWN_TIMEOUT_S)


# ---- the program ----


def program_of(args: argparse.Namespace, environ: Mapping[str, str]) -> Program:
    """The program that the workers run.

    Raises:
        SpecError: The program does not exist, or the flags that describe it contradict each other.
    """
    if args.no_python and not args.run_path:
        if args.module:
            raise SpecError("--no-python with --module: a module is run by Python; leave one out")
        if shutil.which(args.script) is None:
            raise SpecError(
                f"{args.script}: there is no such program that can be executed; with --no-python "
                "give one on the PATH, or a path with its execute permission set"
            )
        return Program(
            target=args.script,
            is_module=False,
            arguments=args.arguments,
            command=[args.script, *args.arguments],
        )
    if args.module:
        # As `python -m`: the module may be in the working directory, and so may what it imports.
        sys.path.insert(0, os.getcwd())
        if not _is_there(args.script):
            raise SpecError(f"-m {args.script}: there is no such module; give its full dotted name")
    elif not Path(args.script).is_file():
        raise SpecError(
            f"{args.script}: there is no such script; give its path, or -m for a module"
        )
    # Without a command the workers are forks of the forkserver, which is this very interpreter.
    command: list[str] = []
    interpreter = environ.get("PYTHON_EXEC") or sys.executable
    if not args.run_path and (args.cold_start or interpreter != sys.executable):
        if shutil.which(interpreter) is None:
            raise SpecError(f"PYTHON_EXEC={interpreter}: there is no such program")
        command = [interpreter, "-u", *(["-m"] if args.module else []), args.script]
        command += args.arguments
    return Program(
        target=args.script, is_module=args.module, arguments=args.arguments, command=command
    )


def _is_there(module: str) -> bool:
    """Whether there is a module of this full name."""
    # `find_spec` imports the packages of a module. What they do then is for the workers: they may
    # start threads, use a GPU, or fail.
    name, *below = module.split(".")
    with contextlib.suppress(Exception):
        spec = find_spec(name)
        for part in below:
            places = spec.submodule_search_locations if spec is not None else None
            spec = PathFinder.find_spec(part, list(places or ()))
        if spec is None:  # a package may add places when it is imported
            spec = find_spec(module)
        return spec is not None
    return False


def preload_of(wanted: tuple[str, ...], program: Program) -> tuple[str, ...]:
    """The modules that the forkserver imports before it forks workers.

    Raises:
        SpecError: A module does not exist, or workers are not forked.
    """
    flag = f"--preload={','.join(wanted)}"
    if program.command:
        if wanted:
            raise SpecError(
                f"{flag}: workers are forked from those imports only if Python runs the script in "
                "place; leave out --preload, or --cold-start, --no-python and PYTHON_EXEC"
            )
        return ()
    for module in wanted:
        # Its package alone is looked for: to look into one would import it here.
        if not _is_there(module.partition(".")[0]):
            raise SpecError(
                f"{flag}: there is no module {module}; install it, or leave it to the script"
            )
    return (*AgentConfig.preload, *wanted)


# ---- output ----


def _streams(args: argparse.Namespace, environ: Mapping[str, str]) -> Streams:
    redirects = parse_selection("--redirects", args.redirects)
    tee = parse_selection("--tee", args.tee)
    if args.log_dir == NO_FILES:
        return Streams(format=Format(args.log_format))
    return Streams(
        redirects=redirects,
        tee=tee,
        keep_all=args.log_dir is not None and not redirects and not tee,
        local_ranks=parse_ranks(args.local_ranks_filter),
        filters={Std.OUT: args.duplicate_stdout_filters, Std.ERR: args.duplicate_stderr_filters},
        prefix=environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE") or PREFIX,
        format=Format(args.log_format),
        file_limit_bytes=args.log_limit,
    )


def make_log_dir(path: Path | None) -> None:
    """Make the directory that --log-dir names, if it names one.

    Raises:
        SpecError: The directory cannot be made.
    """
    if path in (None, NO_FILES):
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecError(
            f"--log-dir={path}: {error.strerror}; name a directory that can be written"
        ) from error


# ---- workers on this node ----


def wants_gpus(args: argparse.Namespace) -> bool:
    """Whether each worker needs its own GPU."""
    return bool(args.nproc_per_node == "gpu")


def count_slots(text: str) -> int:
    """The number of workers for `--nproc-per-node`: a number, or what the machine has.

    Raises:
        SpecError: The text is invalid.
        AgentFailed: The text is `gpu`, and there is none; or the GPUs cannot be counted.
    """
    check_slots(text)
    counted = text in {"auto", "gpu"} and list(DEVICES.glob("nvidia[0-9]*"))
    gpus = _count_gpus() if counted else 0
    cpus = len(os.sched_getaffinity(0))
    by_name = {"auto": gpus or cpus, "cpu": cpus, "gpu": gpus}
    if text == "gpu" and not gpus:
        # Perhaps a fault of this machine: other nodes of the job may have GPUs.
        why = "--nproc-per-node=gpu: torch sees no GPU here; use cpu or a number"
        raise AgentFailed(AgentExit.UNHEALTHY, why)
    return by_name[text] if text in by_name else int(text)


def _count_gpus() -> int:
    """The number of GPUs that torch sees.

    Raises:
        AgentFailed: The process does not end, as on a machine with a GPU that hangs.
    """
    # In another process: the agent never imports torch.
    command = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
    try:
        answer, _ = process.communicate(timeout=COUNT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # in the driver, it may never end
            process.communicate(timeout=1.0)
        why = f"torch has not counted the GPUs of this machine within {COUNT_S:g} s"
        remedy = "look at nvidia-smi and dmesg, or write the number into --nproc-per-node"
        raise AgentFailed(AgentExit.UNHEALTHY, f"{why}; {remedy}") from None
    return int(answer) if answer.strip().isdecimal() else 0


def check_slots(text: str) -> None:
    """Raise SpecError if --nproc-per-node is invalid."""
    if text not in {"auto", "cpu", "gpu"} and not (text.isdecimal() and int(text) > 0):
        raise SpecError(f"--nproc-per-node={text}: write a number from 1, or auto, cpu, gpu")


def _cpus(mode: str, slots: int, environ: Mapping[str, str]) -> tuple[numa.Cpus, ...]:
    """The CPUs of each worker, by local rank; empty if workers are not bound."""
    if not mode:
        return ()
    # The workers' GPUs are those that CUDA shows them, not those of the machine.
    machine = numa.read_machine(visible=environ.get("CUDA_VISIBLE_DEVICES"))
    if machine is None:
        log.warning("--numa-binding=%s: /sys does not describe this machine; ignored", mode)
        return ()
    if len(machine.nodes) == 1 and mode in ("node", "socket"):
        log.info("--numa-binding=%s: this machine has one NUMA node; nothing to bind", mode)
        return ()
    return tuple(numa.cpus_of(mode, machine, local, slots) for local in range(slots))
