"""The time of all nodes of a job at its end, which the agent of rank 0 logs.

The other agents end at the same time, and each writes the ledger of its node last; the agent of
rank 0 waits for them briefly.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping

from zero_contract.values import in_words
from zero_orchestrator.errors import StoreError
from zero_orchestrator.observe.events import by_node, goodput_prefix, read_goodput
from zero_orchestrator.observe.goodput import Use, add_up, in_parts, total_ns
from zero_orchestrator.store.kv import KeyValueStore

WAIT_S = 3.0
"""How long the ledgers of the other nodes are waited for, at the end of the job."""
_POLL_S = 0.1


def await_ledgers(
    store: KeyValueStore, job: str, nodes: Collection[str], wait_s: float = WAIT_S
) -> tuple[Mapping[Use, int], int]:
    """The time of all nodes that a job has had.

    Args:
        store: The store with the ledgers.
        job: The job's name.
        nodes: The nodes whose agents end now.
        wait_s: The longest wait for their ledgers.

    Returns:
        The time by use, and the number of these nodes whose last seconds are not in it. Without
        etcd, nothing of any node.
    """
    prefix, until_s = goodput_prefix(job), time.monotonic() + wait_s
    while True:
        try:
            items = store.range(prefix).items
        except StoreError:
            return {}, len(nodes)
        ended = {node for node, record in by_node(prefix, items).items() if record.get("last")}
        missing = len(set(nodes) - ended)
        if not missing or time.monotonic() > until_s:
            return add_up(read_goodput(item) for item in items), missing
        time.sleep(_POLL_S)


def in_a_sentence(used_ns: Mapping[Use, int], missing: int) -> str:
    """The time of a job, for its log."""
    text = f"the time of all nodes, {in_words(total_ns(used_ns) / 1e9)}: {in_parts(used_ns)}"
    return f"{text}; the last seconds of {missing} nodes are missing" if missing else text
