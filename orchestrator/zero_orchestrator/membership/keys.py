"""The names of a job's keys, and what each is for.

Under `/zero/v1/<job>/` (all values JSON):

    spec                    the JobSpec, written once
    nodes/<id>              a live agent; leased
    round                   {n, state, cause, by, at, took_s, failed}: the round that is ACTIVE, or
                            being left (FORMING), or how the job ended
    rounds/<n>/members      ordered membership; written once, in the transition to ACTIVE
    rounds/<n>/master       where the round's TCPStore listens; written once by rank 0's agent
    rounds/<n>/yield        why the workers are asked to stop at the next step boundary
    rounds/aside/<id>       no round begins with this node until it reaches the others again
    reports/<n>/quiet/<id>  the node's workers of round n are gone
    reports/<n>/done/<id>   the node's workers of round n have all exited with 0
    reports/<n>/leaving/<id> the node has been told to leave, and may go before its workers do
    reports/<n>/fail/<id>   the node's workers of round n failed, and how
    reports/<n>/symptom/<id> the node's workers of round n lost a peer: the cause is elsewhere
    reports/<n>/links/<id>  which members of round n the node does not reach, perhaps none
    charged/<n>             round n ended in a failure: one charge to the restart budget
    excluded/<host>         no round begins with this host; mostly under a lease that runs out
    ckpt/latest             the newest published checkpoint
    cmd/stop                somebody wants the whole job to end, and who and why
    cmd/drain/<id>          somebody wants this agent to leave; under the agent's own lease
    store/members           where the voters of the job's own etcd are: HOST:PORT of each
    store/invited           the node that is to run one more member; deleted when it begins
    store/unable/<id>       why a node runs no member
    store/heir/<id>         the store <id> was lost for good, and this one has followed it
    store/change            the node that changes the members at present; leased

What starts with `round` is the job's *course*: a handful of changes in each round, which every
agent watches (`job_view.py`). What every node writes is elsewhere, and only the first few agents
watch that. `job_state` says what the values mean, `events` what is below `/zero/progress/<job>/`.
"""

from __future__ import annotations

from dataclasses import dataclass

ROUND = "round/"
"""Part of the key of an event that its transition has written; names of nodes have no slash."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The names of one job's keys."""

    job: str

    @property
    def prefix(self) -> str:
        """The prefix of all keys that agents watch."""
        return f"/zero/v1/{self.job}/"

    @property
    def spec(self) -> str:
        """The job's specification."""
        return self.prefix + "spec"

    @property
    def secret(self) -> str:
        """The secret that agents prove to each other to know; no other process reads it."""
        # A prefix of its own: who may read the job otherwise, as a dashboard, need not read it.
        return f"{self.secrets}key"

    @property
    def secrets(self) -> str:
        """The prefix of the keys that the job's agents alone may read."""
        return f"/zero/secret/{self.job}/"

    @property
    def round(self) -> str:
        """The state of the current round."""
        return self.prefix + "round"

    @property
    def latest(self) -> str:
        """The newest published checkpoint."""
        return self.prefix + "ckpt/latest"

    @property
    def in_memory(self) -> str:
        """The newest checkpoint in memory; written at every step, so not where agents watch."""
        return f"/zero/progress/{self.job}/job/in_memory"

    @property
    def events(self) -> str:
        """The prefix of the keys of the job's events."""
        return f"/zero/events/{self.job}/"

    def told(self, fence: int, move: str) -> str:
        """The event of a transition from this revision of the round; no node has such a name."""
        return f"{self.events}{ROUND}{fence}.{move}"

    @property
    def stop(self) -> str:
        """The wish that the job ends."""
        return self.prefix + "cmd/stop"

    @property
    def round_state(self) -> str:
        """The prefix of the keys that every agent must know."""
        return self.prefix + "round"

    @property
    def nodes(self) -> str:
        """The prefix of the keys of the live agents."""
        return self.node("")

    def drain(self, node: str) -> str:
        """The wish that a node leaves."""
        return f"{self.prefix}cmd/drain/{node}"

    def node(self, node: str) -> str:
        """A live agent."""
        return f"{self.prefix}nodes/{node}"

    @property
    def charges(self) -> str:
        """The prefix of the keys of the charges."""
        return f"{self.prefix}charged/"

    def charged(self, n: int) -> str:
        """The charge for round n."""
        return f"{self.charges}{n}"

    def excluded(self, host: str) -> str:
        """The exclusion of a host."""
        return f"{self.prefix}excluded/{host}"

    def store_part(self, *parts: str) -> str:
        """A key about the job's own etcd, for its agents."""
        return self.prefix + "/".join(("store", *parts))

    def heir(self, store: str) -> str:
        """Present if the store that has this key has followed the one with this id."""
        return self.store_part("heir", store)

    def aside(self, node: str) -> str:
        """Present while a node is set aside; every agent must know."""
        return f"{self.prefix}rounds/aside/{node}"

    def of_round(self, n: int, *parts: str) -> str:
        """A key of round n that every agent must know."""
        return "/".join((f"{self.prefix}rounds/{n}", *parts))

    def report(self, n: int, *parts: str) -> str:
        """A node's report about its part of round n; the parts are its kind and the node."""
        return "/".join((f"{self.prefix}reports/{n}", *parts))
