"""`zero-agent --preflight`: runs every health check, prints a table, and starts nothing."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from zero_agent.command.resolve import NO_FILES, count_slots, wants_gpus
from zero_agent.etcd import etcd_choice
from zero_agent.etcd.etcd_access import Access, clock_complaint
from zero_agent.etcd.etcd_process import find_etcd
from zero_agent.etcd.rdzv_conf import RdzvConf
from zero_agent.node.health_checks import HealthCheckFailed, HealthProblem, Surroundings, examine
from zero_agent.node.network import address_towards
from zero_contract.exit_codes import AgentExit
from zero_orchestrator.errors import SpecError, StoreError
from zero_orchestrator.membership.keys import Keys

_PIPE_COLUMNS = 250


def preflight(args: argparse.Namespace, conf: RdzvConf) -> int:
    """Check this node before a job begins; returns the exit code.

    Raises:
        SpecError: A flag that a check uses is wrong.
    """
    access = Access.of(args, conf, args.rdzv_endpoint)
    named = etcd_choice.choose(args)[0] is etcd_choice.Way.NAMED

    def ask_etcd() -> str:
        try:
            if not named:
                return f"the agent starts {find_etcd()}"
            question = Keys(args.rdzv_id).round  # a key of this job: the login may not allow others
            with access.store() as store:
                store.get(question)  # connects and logs in, which is not to be measured
                began_s = time.monotonic()
                store.get(question)
                took_s = time.monotonic() - began_s
                note = store.version_note()
        except (SpecError, StoreError) as error:
            raise HealthCheckFailed(str(error)) from error
        return f"{access.endpoints} answers in {took_s * 1000:.1f} ms{note and f'; {note}'}"

    findings = examine(
        Surroundings(
            # Without any GPU, count_slots would raise; the check of the GPUs reports it instead.
            slots=1 if args.nproc_per_node == "gpu" else count_slots(args.nproc_per_node),
            gpus=wants_gpus(args),
            address=args.local_addr or (address_towards(access.first) if named else ""),
            log_dir=None if args.log_dir == NO_FILES else args.log_dir,
            command=args.health_check,
            command_timeout_s=args.health_check_timeout,
            ask_etcd=ask_etcd,
            ask_clock=(lambda: clock_complaint(access.clock_offset_s())) if named else None,
            environ=os.environ,
        )
    )
    show(findings)
    return AgentExit.OK if all(finding.passed for finding in findings) else AgentExit.UNHEALTHY


def show(findings: Sequence[HealthProblem]) -> None:
    """Print the findings as a table."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("check", "", "found"):
        table.add_column(column)
    for finding in findings:
        verdict = Text("ok", "green") if finding.passed else Text("FAILED", "bold red")
        text = finding.found + (f"; {finding.remedy}" if finding.remedy else "")
        table.add_row(finding.check, verdict, Text(text))
    console = Console(markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        console.width = _PIPE_COLUMNS
    console.print(table)
