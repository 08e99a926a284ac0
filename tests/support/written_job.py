"""A job in a store, written key by key, and what `zero-ctl` reads of it."""

from tests.support.memory_store import MemoryStore
from zero_orchestrator.membership.job_state import Members, Node
from zero_orchestrator.membership.keys import Keys
from zero_orchestrator.membership.spec import JobSpec
from zero_orchestrator.observe import status
from zero_orchestrator.observe.status import Condition

SPEC = JobSpec(min_nodes=1, max_nodes=3, max_restarts=2, command=("train.py", "--fast"))


def node(name: str) -> Node:
    return Node(id=name, incarnation="1", address=f"host-{name}", slots=2)


class Job:
    """A job written key by key."""

    def __init__(self, store: MemoryStore, name: str = "gpt") -> None:
        self.store, self.keys = store, Keys(name)
        store.put(self.keys.spec, SPEC.to_json())

    def live(self, names: str) -> None:
        for name in names:
            lease = self.store.grant(3)
            self.store.put(self.keys.node(name), node(name).to_json(), lease=lease)

    def round(self, n: int, state: str, members: str, cause: str = "because") -> None:
        record = f'{{"n": {n}, "state": "{state}", "cause": "{cause}"}}'
        self.store.put(self.keys.round, record)
        written = Members(tuple(map(node, members))).to_json()
        self.store.put(self.keys.of_round(n, "members"), written)


def read(job: Job) -> status.JobStatus:
    return status.read(job.store, job.keys.job)


def conditions(job: Job) -> dict[str, Condition]:
    now = read(job)
    return {row.node: row.condition for row in (*now.members, *now.spares)}
