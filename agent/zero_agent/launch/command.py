"""`zero-ctl launch`: from a hostfile to a running job and its exit code.

Without a hostfile, or with no other host than this one, this process becomes the agent (exec). With
several hosts, the agents meet at --rdzv-endpoint, or at an etcd that this process runs for as long
as the job runs, and that listens on the address of the route to the first host.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from zero_agent.etcd.etcd_process import LOOPBACK
from zero_agent.etcd.local_etcd import private_server
from zero_agent.launch.environment import exported
from zero_agent.launch.hosts import Hosts, read_hostfile, select
from zero_agent.launch.plan import LaunchPlan
from zero_agent.launch.runners import RUNNERS, Remote
from zero_agent.launch.session import Session
from zero_agent.node.network import is_local
from zero_agent.node.scratch import Scratch
from zero_contract.errors import ZeroError
from zero_contract.exit_codes import CtlExit
from zero_orchestrator.addresses import host_port, route_towards, split_host_port
from zero_orchestrator.ctl import cli as zero_ctl
from zero_orchestrator.errors import SpecError, StoreError
from zero_orchestrator.membership.runs import command_name
from zero_orchestrator.membership.spec import check_job_name
from zero_orchestrator.store.join_token import ENV_JOIN_TOKEN, new_token

DEFAULT_HOSTFILE = Path("/job/hostfile")
"""DeepSpeed's default hostfile, used if it exists."""

_FLAGS: Sequence[tuple[str, str, Mapping[str, object]]] = (
    (
        "-H --hostfile",
        "file of hosts, one a line, as HOST slots=N (default /job/hostfile)",
        {"type": Path},
    ),
    (
        "-i --include",
        "hosts and slots to use: HOST[:SLOT,...][@HOST...] (default: all)",
        {"default": ""},
    ),
    ("-e --exclude", "hosts and slots to leave out, written as for --include", {"default": ""}),
    ("--num-nodes", "number of hosts to use, the first of the file", {"type": int, "metavar": "N"}),
    (
        "--num-gpus",
        "number of slots to use of each host, the first ones",
        {"type": int, "metavar": "N"},
    ),
    (
        "--min-nodes",
        "smallest number of hosts with which the job continues (default 1)",
        {"type": int, "default": 1, "metavar": "N"},
    ),
    (
        "--max-restarts",
        "number of failures that the job may survive (default 3)",
        {"type": int, "default": 3, "metavar": "N"},
    ),
    (
        "--launcher",
        "how hosts are reached (default ssh)",
        {"choices": sorted(RUNNERS), "default": "ssh"},
    ),
    (
        "--launcher-args",
        "further flags for the program of --launcher",
        {"type": shlex.split, "default": [], "metavar": "FLAGS"},
    ),
    ("--ssh-port", "port of sshd on the hosts", {"type": int, "metavar": "PORT"}),
    (
        "--rdzv-endpoint",
        "addresses of an etcd that all hosts reach (default: one that runs here)",
        {"default": "", "metavar": "HOST:PORT[,...]"},
    ),
    (
        "--rdzv-id",
        "name of the job (default: derived from the script)",
        {"default": "", "metavar": "NAME"},
    ),
    (
        "--agent-args",
        "further flags for zero-agent",
        {"type": shlex.split, "default": [], "metavar": "FLAGS"},
    ),
    ("--no-ssh", "start only the agent of this host; run the command on each host", {}),
    ("--node-rank", "with --no-ssh: number of this host, from 0", {"type": int, "metavar": "K"}),
    ("--master-addr", "with --no-ssh: address of host 0", {"default": "", "metavar": "HOST"}),
    (
        "--master-port",
        "with --no-ssh: port of the etcd on host 0",
        {"type": int, "metavar": "PORT"},
    ),
    ("-m --module", "run SCRIPT as a module, as `python -m` does", {}),
    ("--no-python", "run SCRIPT as a program, without Python", {}),
    ("--no-local-rank", "no effect: LOCAL_RANK is in the environment, not an argument", {}),
    ("--force-multi", "reach a single host through --launcher, too", {}),
    ("--dry-run", "print the commands that would start the agents, and run nothing", {}),
)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """All flags with their values, and `script` and `arguments`; exits with 2 on wrong usage."""
    return make_parser().parse_args(argv)


def make_parser() -> argparse.ArgumentParser:
    """The command line of `zero-ctl launch`."""
    made = argparse.ArgumentParser(
        prog="zero-ctl launch",
        usage="zero-ctl launch [FLAG ...] SCRIPT [ARGUMENT ...]",
        description="Start an agent on every host of a hostfile, and wait for the job's end. A "
        "host that dies does not end the job; one whose connection is lost is tried again.",
        epilog="Ctrl-C lets the job stop with a checkpoint; a second one ends it at once. A flag "
        "may be written with - or _. Exit code: the job's; 255: no host could be reached.",
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32),
    )
    for names, text, more in _FLAGS:
        options = dict(more) or {"action": "store_true"}
        given = names.split()
        given += [f"--{name[2:].replace('-', '_')}" for name in given if "-" in name[2:]]
        made.add_argument(*given, help=text, **options)  # type: ignore[arg-type]
    made.add_argument("script", metavar="SCRIPT", help="training script")
    made.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script"
    )
    return made


log = logging.getLogger("zero")

_SSH_PORT = 22


def main(argv: Sequence[str] | None = None) -> None:
    """The entry point of `zero-ctl launch`."""
    logging.basicConfig(format="[zero %(asctime)s] %(message)s", datefmt="%H:%M:%S")
    log.setLevel(logging.INFO)
    try:
        code = _run(parse(sys.argv[1:] if argv is None else argv))
    except ZeroError as error:
        print(f"zero-ctl launch: {error}", file=sys.stderr)
        code = CtlExit.NO_STORE if isinstance(error, StoreError) else CtlExit.USAGE
    sys.exit(code)


def _run(args: argparse.Namespace) -> int:
    hosts: Hosts | None = None
    # The default one may be absent, the one that is named may not: `read_hostfile` refuses it.
    path = args.hostfile or DEFAULT_HOSTFILE
    if args.hostfile is not None or path.is_file():
        chosen = {"num_nodes": args.num_nodes, "num_slots": args.num_gpus}
        hosts = select(read_hostfile(path), include=args.include, exclude=args.exclude, **chosen)
    elif args.include or args.exclude or not (args.no_ssh or args.num_nodes in (None, 1)):
        raise SpecError("--include, --exclude, --num-nodes: of which hosts? give --hostfile")
    if args.no_ssh:
        return _go_on_as(_own_agent(args, hosts), args)
    if hosts is None or (len(hosts) == 1 and is_local(next(iter(hosts))) and not args.force_multi):
        slots = next(iter(hosts.values())) if hosts else None
        count = args.num_gpus or (len(slots) if slots else "auto")
        # A filter may have left out the first ones, so their number alone does not say which.
        if slots:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, slots))
        where = [f"--rdzv-endpoint={args.rdzv_endpoint}"] if args.rdzv_endpoint else []
        return _go_on_as(["--nnodes=1", f"--nproc-per-node={count}", *where], args)
    if not 1 <= args.min_nodes <= len(hosts):
        raise SpecError(f"--min-nodes={args.min_nodes}: {len(hosts)} hosts; write 1 to that")
    remote = Remote(
        port=args.ssh_port,
        arguments=tuple(args.launcher_args),
        pdsh_ssh_arguments=os.environ.get("PDSH_SSH_ARGS_APPEND", ""),
    )
    program = "srun" if args.launcher == "slurm" else args.launcher
    if not args.dry_run and shutil.which(program) is None:
        raise SpecError(
            f"--launcher={args.launcher}: {program} is not installed here; install it, choose "
            "another launcher, or start every host by itself with --no-ssh"
        )
    with _endpoint(args, hosts) as endpoint:
        plan = _plan(args, hosts, endpoint)
        commands = RUNNERS[args.launcher](plan, remote)
        if not args.dry_run:
            session = Session(commands, lambda: _stop(plan))
            log.info("job %s on %s; its etcd is %s", plan.job, ", ".join(hosts), endpoint)
            return session.run()
        for command in commands:
            # The values of variables are not printed: the output ends in logs.
            names = sorted({*plan.env, *command.env})
            print(f"# with {', '.join(names) or 'no variables'}\n{shlex.join(command.argv)}")
    return 0


# ---- one agent, here ----


def _own_agent(args: argparse.Namespace, hosts: Hosts | None) -> list[str]:
    """The flags of this host's agent if every host runs the same command (--no-ssh)."""
    count = len(hosts) if hosts else args.num_nodes
    if count is None:
        raise SpecError("--no-ssh: how many hosts? give --hostfile or --num-nodes")
    if args.rdzv_endpoint:
        meet = [f"--nnodes={args.min_nodes}:{count}", f"--rdzv-endpoint={args.rdzv_endpoint}"]
    elif args.node_rank is None or not args.master_addr:
        raise SpecError("--no-ssh: give --node-rank and --master-addr, or --rdzv-endpoint")
    else:
        meet = [f"--nnodes={count}", f"--node-rank={args.node_rank}"]
        meet += [f"--master-addr={args.master_addr}"]
        meet += [f"--master-port={args.master_port}"] if args.master_port else []
    rank = args.node_rank or 0
    if not 0 <= rank < count:
        raise SpecError(f"--node-rank={rank}: with {count} hosts write 0 to {count - 1}")
    slots = list(hosts.values())[rank] if hosts else None
    if hosts and args.node_rank is None and len(set(hosts.values())) > 1:
        raise SpecError(
            "--no-ssh: the slots of the hosts differ, so --rdzv-endpoint is not enough; give "
            "--node-rank, the number of this host in the hostfile"
        )
    # The first ones need no name, and a scheduler may have chosen this host's GPUs.
    if slots and slots != tuple(range(len(slots))):
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, slots))
    return [*meet, f"--nproc-per-node={len(slots) if slots else args.num_gpus or 'auto'}"]


def _go_on_as(flags: list[str], args: argparse.Namespace) -> int:
    """Become the agent (exec); returns only with --dry-run."""
    named = [f"--rdzv-id={args.rdzv_id}"] if args.rdzv_id else []
    flags = [f"--max-restarts={args.max_restarts}", *flags, *named, *args.agent_args]
    argv = [sys.executable, "-m", "zero_agent", *flags, *_program(args)]
    if not args.dry_run:
        # Of the files alone: the variables of this environment stay in it.
        os.environ |= exported({}, _directories())
        os.execv(sys.executable, argv)
    print(shlex.join(argv))
    return 0


# ---- agents on several hosts ----


def _plan(args: argparse.Namespace, hosts: Hosts, endpoint: str) -> LaunchPlan:
    command = (args.script, *args.arguments)
    name = command_name(args.script, command, is_module=args.module)
    # A name of its own in each launch: at an etcd that stays, agents of the same name would come
    # late to the job of the launch before, which has ended.
    job = args.rdzv_id or f"{name}.{secrets.token_hex(2)}"
    return LaunchPlan(
        hosts=hosts,
        job=check_job_name(job),
        endpoint=endpoint,
        program=tuple(_program(args)),
        min_nodes=args.min_nodes,
        max_restarts=args.max_restarts,
        agent_flags=tuple(args.agent_args),
        env=exported(os.environ, _directories()),
        python=sys.executable,
        directory=Path.cwd(),
    )


def _program(args: argparse.Namespace) -> list[str]:
    switches = [
        f"--{name}" for name in ("module", "no-python") if vars(args)[name.replace("-", "_")]
    ]
    return [*switches, args.script, *args.arguments]


def _directories() -> tuple[Path, Path]:
    return Path.home(), Path.cwd()


@contextlib.contextmanager
def _endpoint(args: argparse.Namespace, hosts: Hosts) -> Iterator[str]:
    if args.rdzv_endpoint:
        yield args.rdzv_endpoint
        return
    address = _own_address(hosts, args)
    # Placeholders for the endpoint of an etcd that is not started.
    if args.dry_run:
        if address is None:
            text = "an address of this machine, which these hosts' names do not determine"
            log.info("ADDRESS stands for %s: name an etcd with --rdzv-endpoint", text)
        log.info("PORT stands for a free port of this machine, where the job's etcd will listen")
        yield host_port(address or "ADDRESS", "PORT")
        return
    if address is None:
        raise SpecError(
            f"{', '.join(hosts)}: only the launcher can resolve these names, so the address by "
            "which the hosts reach this machine is unknown; write addresses into the hostfile, or "
            "name an etcd that the hosts reach with --rdzv-endpoint"
        )
    # An etcd that listens for other hosts is never open to all who reach it.
    token = exported(os.environ, _directories()).get(ENV_JOIN_TOKEN) or new_token()
    os.environ[ENV_JOIN_TOKEN] = token  # for the hosts, and for `zero-ctl stop`
    with private_server([] if address == LOOPBACK else [address], token=token) as local:
        endpoint = host_port(address, split_host_port(local)[1])
        with contextlib.closing(Scratch("zero-launch-")) as scratch:  # only this user can read it
            file = scratch.path / "token"
            file.write_text(f"{token}\n")
            look = f"{ENV_JOIN_TOKEN}=$(cat {file}) zero-ctl status --rdzv-endpoint={endpoint}"
            log.info("its etcd admits only holders of the token; from another terminal: %s", look)
            yield endpoint


def _own_address(hosts: Hosts, args: argparse.Namespace) -> str | None:
    """The address by which the hosts can reach this machine; None if it is unknown."""
    # That of the route to the first of them: all hosts are taken to be in one network.
    first = next((host for host in hosts if not is_local(host)), LOOPBACK)
    names = [first.rpartition("@")[2]]
    if args.launcher == "ssh" and shutil.which("ssh") is not None:
        # The host may be an alias of ssh's own configuration, which no resolver knows.
        asked = subprocess.run(
            ["ssh", "-G", *args.launcher_args, "--", first],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
        options = (line.partition(" ") for line in asked.stdout.splitlines())
        names += [value for name, _, value in options if name == "hostname"]
    found = (route_towards(host_port(name, _SSH_PORT)) for name in names if name)
    return next(filter(None, found), None)


def _stop(plan: LaunchPlan) -> None:
    """Request the end of the job, as `zero-ctl stop` does."""
    with contextlib.suppress(SystemExit):  # `zero-ctl stop` has logged its failure
        why = "--reason=the launcher was asked to end"
        zero_ctl.main(["stop", plan.job, f"--rdzv-endpoint={plan.endpoint}", why])
