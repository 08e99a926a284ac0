"""The page of all exit codes: their docstrings, and the table of what follows from each."""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum

from docs.writing import attribute_docs, page, table
from zero_contract.exit_codes import AGENT, CRASHED, LOST, SIGTERM, AgentExit, CkptExit, CtlExit

_OTHERS: dict[int, str] = {
    1: "Python could not start the agent at all (a broken installation); never the job's end.",
    126: "The shell could not execute the agent.",
    127: "The shell did not find the agent.",
    SIGTERM: "The agent received SIGTERM: it saved and left. SIGINT: 130, SIGHUP: 129.",
    LOST: "ssh lost its connection to the host (`zero-ctl launch` only).",
}
_HEAD = """# Exit codes

`torchrun` exits with 0 or 1. `zero-agent` exits with 0 if the whole job is done, and otherwise with
a code that says whose fault it was; scripts that ask for "not 0" keep working. A failed job is 91
and not 1, because 1 is also what Python exits with when one host has a broken installation, and
that must never look like the end of everybody's job. After a failure of one node (1, 3, 4, 8, 70,
126, 127, a signal) the job continues, and the node is worth another try.
"""
_AFTER_THE_AGENTS = """
Any other code is treated like 70. `zero-ctl launch`, `zero-ctl run --on local` and the
batch script for Slurm exit with the code of an agent that saw the job's end, 0 first; if
none did, with the highest. The batch script asks etcd whether the job is done, because
srun reports only the highest code. After 143 it requeues the job, unless Slurm has ended
the job (`scancel`).
"""
_CRASH = (str(CRASHED), "An error inside the program, with a traceback.")


def exit_codes() -> str:
    """All exit codes, and what each means to whatever started the process."""
    from zero_contract.worker import ExitCode

    heads = ("code", "what happened")
    agent = (*heads, "Kubernetes", "systemd: the unit; Slurm: the node", "`zero-ctl launch`")
    return page(
        _HEAD,
        "## zero-agent\n",
        *table(agent, _agent_rows()),
        _AFTER_THE_AGENTS,
        "## Workers, as their agent reads them\n",
        *table(heads, _rows(ExitCode)),
        "\nAny other code, and any signal, is a failure of that worker.\n",
        "## zero-ctl\n",
        *table(heads, _rows(CtlExit, _CRASH)),
        "\n## zero-ckpt\n",
        *table(heads, _rows(CkptExit, _CRASH)),
    )


def _agent_rows() -> Iterator[tuple[str, ...]]:
    docs = attribute_docs(AgentExit)
    texts = {code.value: docs[code.name] for code in AgentExit} | _OTHERS
    for codes, *verdicts in AGENT:
        what = " ".join(texts[code] for code in codes)
        yield (", ".join(map(str, codes)), what, *verdicts)


def _rows(kind: type[IntEnum], *further: tuple[str, str]) -> Iterator[tuple[str, str]]:
    docs = {"OK": "Done, and nothing wrong was found."} | attribute_docs(kind)
    yield from ((str(code.value), docs[code.name]) for code in kind)
    yield from further
