"""Jobs in every state that an operator looks at, written to a store as their agents write them.

`python -m tests.support.staged ENDPOINT` writes all of them to a running etcd, for `zero-ctl`.
"""

import hashlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache

from zero_orchestrator.membership.failures import Charge, Exclusion
from zero_orchestrator.membership.job_state import Members, Node, State
from zero_orchestrator.membership.keys import Keys
from zero_orchestrator.membership.spec import JobSpec
from zero_orchestrator.observe import history as histories
from zero_orchestrator.observe import pace
from zero_orchestrator.observe import timeline as timelines
from zero_orchestrator.observe.events import (
    events_prefix,
    goodput_prefix,
    history_key,
    progress_prefix,
    seen_key,
    verdicts_key,
)
from zero_orchestrator.observe.goodput import Begins, Doing, Ledger, Mark, Stepped, to_record
from zero_orchestrator.observe.history import History, Saved
from zero_orchestrator.observe.pace import Pace, Quantiles, Speed
from zero_orchestrator.observe.timeline import Phase, Timeline
from zero_orchestrator.observe.verdicts import Kind, Verdict, to_value
from zero_orchestrator.store.etcd.client import EtcdStore
from zero_orchestrator.store.kv import KeyValueStore

BATCH = 256
WAIT_S = 5.0
"""Time between two signs of a worker that waits for room."""
LEASE_S = 3600
"""Nodes that are alive stay so for this long: nobody keeps their leases alive."""
_NS = 1e9


class Staged:
    """A job that happens as told, up to now; `write` puts its records into a store."""

    def __init__(
        self, began_s: float, name: str, nodes: int, *, most: int, step_s: float, slots: int = 8
    ) -> None:
        """The job begins.

        Args:
            began_s: When, in seconds since the epoch.
            name: Of the job.
            nodes: Number of nodes.
            most: Most nodes of a round.
            step_s: Duration of a step.
            slots: Workers of a node.
        """
        self.name, self.most, self.step_s = name, most, step_s
        self.names = [f"gpu-{number:02d}" for number in range(nodes)]
        self.slots, self.gone = slots, set[str]()
        self.now_s = self.began_s = began_s
        self.round, self.step, self.restarts = 0, 0, 0
        self.of_round: list[str] = []
        self.total_steps = 3000
        self.state, self.cause = "", ""
        self.state_s = self.now_s
        self.history, self.events = History(), list[dict[str, object]]()
        self.timelines: dict[str, Timeline] = {}
        self.ledgers: dict[str, Ledger] = {}
        self.verdicts: list[Verdict] = []
        self.exclusions: list[Exclusion] = []
        self.preparing = ""
        self.start(*self.names)
        self.tell("open", "the job begins", nodes=self.members)

    @property
    def members(self) -> list[str]:
        """The nodes of a round that begins now."""
        return [name for name in self.names if name not in self.gone][: self.most]

    def start(self, *names: str) -> None:
        """The agents of some nodes start, for the first time or again."""
        begun = Timeline(until_s=self.now_s).begin(Phase.STARTING, self.now_s)
        ledger = Ledger(at_ns=self._at_ns)
        for name in names:
            self.gone.discard(name)
            self.timelines[name] = begun.after(self.timelines.get(name))
            before = self.ledgers.get(name)
            self.ledgers[name] = (
                ledger if before is None else replace(ledger, used_ns=before.used_ns)
            )

    def tell(self, event: str, text: str, node: str = "", **facts: object) -> None:
        record = {"time": self.now_s, "node": node or self.names[0], "round": self.round}
        self.events.append({**record, "event": event, "text": text, **facts})

    def mark(self, nodes: Iterable[str], mark: Mark) -> None:
        made: dict[tuple[int, int], tuple[Ledger, Timeline]] = {}  # most nodes have the same past
        for name in nodes:
            ledger, timeline = self.ledgers[name], self.timelines[name]
            past = id(ledger), id(timeline)
            if past not in made:
                made[past] = ledger.add(mark), timeline.add(mark, self.now_s)
            self.ledgers[name], self.timelines[name] = made[past]

    def waits(self, seconds: float) -> None:
        self.now_s += seconds

    def activate(self, after_s: float = 0.8) -> None:
        """A round begins, with its workers."""
        self.waits(after_s)
        self.round += 1
        members = self.members
        self.settle(State.ACTIVE, "all nodes are in")
        size = len(members) * self.slots
        self.of_round = members
        text = f"round {self.round} runs on {len(members)} nodes, world size {size}"
        self.tell("activate", text, nodes=members)
        self.mark(members, Begins(at_ns=self._at_ns, doing=Doing.RUNNING, reached=self.step))
        others = [name for name in self.names if name not in (*members, *self.gone)]
        self.mark(others, Begins(at_ns=self._at_ns, doing=Doing.IDLE))

    def settle(self, state: State, cause: str) -> None:
        self.state, self.cause, self.state_s = state, cause, self.now_s

    def steps(self, count: int, *, save_every: int = 0) -> None:
        """So many steps, with saves in between."""
        for _ in range(count):
            self.waits(self.step_s)
            self.step += 1
            self._stepped()
            if save_every and self.step % save_every == 0:
                self.save()

    def stalls(self, seconds: float) -> None:
        """The step after the last one lasts so long."""
        self.waits(seconds)
        self.step += 1
        self._stepped()

    def _stepped(self) -> None:
        self.history = self.history.stepped(
            self.step,
            time_s=self.now_s,
            samples=BATCH * self.step,
            workers=len(self.of_round) * self.slots,
            loss=self.loss,
        ).with_duration(self.step_s)
        self._marks()

    def _marks(self, saving_s: float = 0.0) -> None:
        """The workers report their last step, and for how long they have waited for a save."""
        usual_ns, saving_ns = round(self.step_s * _NS), round(saving_s * _NS)
        mark = Stepped(at_ns=self._at_ns, step=self.step, saving_ns=saving_ns, usual_ns=usual_ns)
        self.mark(self.of_round, mark)

    @property
    def loss(self) -> float:
        return 1.9 + 8.2 * math.exp(-self.step / 300) + 0.05 * math.sin(self.step * 2.3)

    def save(self, stall_s: float = 0.4) -> None:
        """A checkpoint on disk."""
        self.waits(stall_s)
        tag = f"step-{self.step:09d}.g{self.round}.3fa9"
        saved = Saved(
            step=self.step,
            tag=tag,
            time_s=self.now_s,
            samples=BATCH * self.step,
            digest=hashlib.sha256(tag.encode()).hexdigest(),
        )
        self.history = self.history.with_checkpoint(saved).with_times(
            self.step, size_bytes=26_843_545_600, stall_s=stall_s, write_s=21.4, publish_s=0.31
        )
        self._marks(saving_s=stall_s)

    def fails_to_save(self, problem: str = "no space left on device") -> None:
        """A save fails; told when it is the first one."""
        first = self.history.failing is None
        self.history = self.history.with_failure(self.step, problem, self.now_s)
        failing = self.history.failing
        assert failing is not None
        if first:
            self.tell("save", f"saves: {failing.in_words()}", step=self.step, failed=True, saves=1)

    def waits_for_room(self, left_s: float, *, for_s: float) -> None:
        """The last save of the script has begun to wait some time ago."""
        self.history = self.history.with_wait(self.step, "room", left_s, self.now_s)
        failing = self.history.failing
        assert failing is not None
        text = f"saves: {failing.in_words()}"
        self.tell("save", text, step=self.step, failed=True, saves=failing.saves)
        for _ in range(round(for_s / WAIT_S)):
            self.waits(WAIT_S)
            self._marks(saving_s=WAIT_S)
        self.history = self.history.with_wait(self.step, "room", left_s - for_s, self.now_s)

    def interrupt(self, cause: str, lost: str = "", *, after_s: float = 0.9) -> None:
        """A round ends in a failure; with `lost`, this node's agent is gone."""
        stepped = bool(self.history.points) and self.history.points[-1].time_s > self.state_s
        idle_s = self.now_s + after_s - self.history.points[-1].time_s if stepped else None
        self.waits(after_s / 3)
        reporter = next(name for name in self.of_round if name != lost)
        text = f"rank {self.slots}: lost its peers (connection reset)"
        self.tell("exit", text, node=reporter, rank=self.slots, symptom=True)
        if lost:
            self.tell("dead", f"the agent of node {lost} is gone: its lease has ended", reporter)
            self.gone.add(lost)
        self.waits(2 * after_s / 3)
        facts = {} if idle_s is None else {"idle_s": round(idle_s, 3)}
        self.restarts += 1
        self.settle(State.FORMING, cause)
        self.tell("interrupt", cause, node=reporter, nodes=self.members, **facts)
        mark = Begins(at_ns=self._at_ns, doing=Doing.FORMING, reached=self.step)
        self.mark(self.of_round, mark)

    def form(self, cause: str) -> None:
        """A round ends without a failure."""
        self.tell("yield", cause)
        self.waits(0.4)
        self.settle(State.FORMING, cause)
        self.tell("form", cause, nodes=self.members, idle_s=0.3)
        begun = [name for name in self.of_round if self.timelines[name].stepped]
        self.mark(begun, Begins(at_ns=self._at_ns, doing=Doing.FORMING, reached=self.step))

    def restore(self) -> None:
        """The workers load the newest checkpoint, and repeat the steps after it."""
        last = self.history.checkpoints[-1]
        self.waits(1.2)
        text = f"the workers resume from step {last.step}: checkpoint {last.tag} on disk"
        facts = {"in_memory": False, "load_s": 0.9, "read_bytes": last.size_bytes}
        self.tell("restore", text, step=last.step, tag=last.tag, **facts)
        for lost in range(last.step + 1, self.step + 1):
            self.waits(self.step_s)
            self.mark(self.of_round, Stepped(at_ns=self._at_ns, step=lost))

    def end(self, event: str, state: State, cause: str) -> None:
        """The job ends."""
        self.settle(state, cause)
        self.tell(event, cause, nodes=self.members)
        self.mark(self.members, Begins(at_ns=self._at_ns, doing=Doing.ENDING))
        self.waits(0.5)
        self.tell("job time", cause, ns={}, missing=[])

    @property
    def _at_ns(self) -> int:
        return round(self.now_s * _NS)

    # ---- the records ----

    def write(self, store: KeyValueStore) -> None:
        """Put all records of the job into a store; nodes that are alive have a lease."""
        keys, lease = Keys(self.name), store.grant(LEASE_S)
        spec = JobSpec(
            min_nodes=min(2, self.most),
            max_nodes=self.most,
            max_restarts=30,
            command=("train.py", "--config=gpt.yaml"),
            owner="ada@login-1",
        )
        store.put(keys.spec, spec.to_json())
        ended = self.state in {"DONE", "FAILED", "STOPPED"}
        nodes = {name: self._node(place) for place, name in enumerate(self.names)}
        for name, node in nodes.items():
            if name not in self.gone and not ended:
                store.put(keys.node(name), node.to_json(), lease=lease)
        if self.round:
            record = {"n": self.round, "state": self.state, "cause": self.cause}
            store.put(keys.round, json.dumps({**record, "at": self.state_s}))
            of_round = Members(tuple(nodes[name] for name in self.of_round), self.restarts)
            store.put(keys.of_round(self.round, "members"), of_round.to_json())
        for n in range(1, self.restarts + 1):
            store.put(keys.charged(n), Charge(n=n, cause="x", reached=self.step).to_json())
        for exclusion in self.exclusions:
            store.put(keys.excluded(exclusion.host), exclusion.to_json(), lease=lease)
        if self.history.checkpoints:
            last = self.history.checkpoints[-1]
            found = {"step": last.step, "tag": last.tag, "digest": last.digest}
            found |= {"samples": last.samples, "time": last.time_s}
            store.put(keys.latest, json.dumps(found))
        if not ended:
            self._write_progress(store, lease)
        self._write_story(store)

    def _write_story(self, store: KeyValueStore) -> None:
        for number, event in enumerate(self.events):
            store.put(f"{events_prefix(self.name)}{number:06d}", json.dumps(event))
        for name, timeline in self.timelines.items():
            until_s = self.now_s if name not in self.gone else timeline.until_s
            shown = timeline.shown(until_s, reports=True)
            usual_ns, at_ns = round(self.step_s * _NS), max(self._at_ns, self.ledgers[name].at_ns)
            used = self.ledgers[name].shown(at_ns, reports=True, usual_ns=usual_ns)
            used_ns = to_record(used)
            record = {"ns": used_ns, "time": until_s, "timeline": timelines.to_record(shown)}
            store.put(goodput_prefix(self.name) + name, json.dumps(record))
        store.put(history_key(self.name), json.dumps(histories.to_record(self.history)))
        if self.verdicts:
            store.put(verdicts_key(self.name), to_value(self.verdicts))
        store.put(seen_key(self.name), json.dumps({"time": self.now_s}))

    def _write_progress(self, store: KeyValueStore, lease: int) -> None:
        for place, name in enumerate(self.of_round):
            ranks = range(place * self.slots, (place + 1) * self.slots)
            paces = Pace(
                speed=Speed(steps=1 / self.step_s, samples=BATCH / self.step_s),
                counts={pace.bucket(self.step_s): self.slots * min(self.step, 900)},
                ranks={str(rank): self._quantiles(rank) for rank in ranks},
            )
            record: dict[str, object] = {
                "pace": pace.to_record(paces),
                "time": self.now_s,
                "preparing": self.preparing,
                "devices": f"{self.slots} x NVIDIA H100 80GB HBM3",
                "pids": {rank: 4000 + rank for rank in ranks},
            }
            if self.step and not self.preparing:
                record |= {
                    "total_steps": self.total_steps,
                    "step": self.step,
                    "samples": BATCH * self.step,
                    "loss": self.loss,
                }
            store.put(progress_prefix(self.name) + name, json.dumps(record), lease=lease)

    def _quantiles(self, rank: int) -> Quantiles:
        slow = 1.7 if any(verdict.rank == rank for verdict in self.verdicts) else 1.0
        p50_s = round(self.step_s * slow * (1 + 0.01 * math.sin(rank)), 4)
        return Quantiles(count=600, p50_s=p50_s, p90_s=1.06 * p50_s, p99_s=1.2 * p50_s)

    def _node(self, place: int) -> Node:
        return Node(
            id=self.names[place],
            incarnation=f"{place}",
            address=f"10.20.{place // 8}.{10 + place % 8}:29400",
            slots=self.slots,
            host=f"rack{place // 8 + 1}-{self.names[place]}.cluster.example",
        )


# ---- the jobs ----


def healthy(began_s: float) -> Staged:
    """It has run for some time without any failure."""
    job = Staged(began_s, "healthy", 4, most=4, step_s=1.3)
    job.activate(9.0)
    job.waits(6.0)
    job.steps(480, save_every=100)
    return job


def recovered(began_s: float) -> Staged:
    """It has lost a node, which is back, and runs; one more node is a spare."""
    job = Staged(began_s, "recovered", 5, most=4, step_s=1.3)
    job.activate(9.0)
    job.waits(6.0)
    job.steps(100, save_every=20)
    job.steps(7)
    job.interrupt("lost node gpu-02; restart 1 of 30", "gpu-02", after_s=3.1)
    job.activate()
    job.restore()
    job.steps(60, save_every=20)
    job.start("gpu-02")
    job.waits(6.0)
    job.mark(["gpu-02"], Begins(at_ns=round(job.now_s * _NS), doing=Doing.IDLE))
    job.steps(40, save_every=20)
    return job


def failed(began_s: float) -> Staged:
    """A broken link has ended it: 30 rounds in a row without a step."""
    job = Staged(began_s, "failed", 4, most=4, step_s=0.9)
    job.activate(9.0)
    job.waits(5.0)
    job.steps(150, save_every=50)
    job.interrupt("lost node gpu-03; restart 1 of 30", "gpu-03", after_s=3.2)
    job.start("gpu-03")
    job.activate(2.0)
    job.restore()
    job.steps(60)
    for attempt in range(2, 31):
        cause = f"workers lost their peers, and no cause appeared; restart {attempt} of 30"
        job.interrupt(cause, after_s=5.2)
        job.activate(1.1)
        job.waits(0.6)
    cause = "the job has failed: workers lost their peers, and all 30 restarts are spent"
    job.end("fail", State.FAILED, cause)
    return job


def full_disk(began_s: float) -> Staged:
    """Its disk is full: saves have failed, and the last one waits for room."""
    job = Staged(began_s, "full-disk", 2, most=2, step_s=1.3)
    job.activate(9.0)
    job.waits(6.0)
    job.steps(200, save_every=50)
    job.tell("store", "etcd does not answer (deadline exceeded); the workers continue", away=True)
    job.steps(60)
    job.tell("store", "etcd answers again", away=False)
    job.steps(40)
    for _ in range(3):
        job.steps(50)
        job.fails_to_save()
    job.waits(3.0)
    job.total_steps = job.step
    job.waits_for_room(3600, for_s=180.0)
    return job


def stuck(began_s: float) -> Staged:
    """It takes no step, because two of its nodes do not reach each other."""
    job = Staged(began_s, "stuck", 4, most=4, step_s=1.3)
    job.activate(9.0)
    job.waits(6.0)
    job.steps(120, save_every=40)
    job.stalls(90.0)
    job.steps(100, save_every=40)
    job.waits(40.0)
    text = "the link between gpu-01 (10.20.0.11) and gpu-03 (10.20.0.13) is dead: no answer in 4 s"
    job.tell("dead link", text, hosts=["gpu-01", "gpu-03"], step=job.step, stuck=True)
    job.verdicts = [Verdict(kind=Kind.DEAD_LINK, text=text, since_step=job.step)]
    job.waits(70.0)
    return job


def large(began_s: float) -> Staged:
    """62 nodes of 8 workers, of which two are spares, with a straggler and an excluded host."""
    job = Staged(began_s, "large", 62, most=60, step_s=95.0)
    job.activate(60.0)
    job.waits(120.0)
    job.steps(600, save_every=50)
    job.steps(13)
    job.interrupt("lost node gpu-17; restart 1 of 30", "gpu-17", after_s=4.0)
    job.activate()
    job.restore()
    job.steps(900, save_every=50)
    job.start("gpu-17")
    job.form("gpu-17 joins")
    job.activate()
    job.steps(400, save_every=50)
    job.step_s = 130.0
    text = "rank 203 on gpu-25 computes 1.7 x slower: its CPUs were slowed down 81 times for heat"
    job.tell("straggler", text, rank=203, host="gpu-25", slow=True, factor=1.7)
    held = Verdict(kind=Kind.STRAGGLER, text=text, rank=203, node="gpu-25", since_step=job.step)
    job.verdicts = [held]
    job.steps(200, save_every=50)
    return job


def ended(began_s: float) -> Staged:
    """It is done, after one failure."""
    job = Staged(began_s, "ended", 3, most=3, step_s=2.0)
    job.activate(9.0)
    job.waits(6.0)
    job.steps(700, save_every=100)
    job.interrupt("lost node gpu-01; restart 1 of 30", "gpu-01", after_s=3.5)
    job.start("gpu-01")
    job.activate(2.0)
    job.restore()
    job.steps(800, save_every=100)
    job.end("finish", State.DONE, "all workers have ended")
    return job


JOBS: Mapping[str, Callable[[float], Staged]] = {
    make.__name__.replace("_", "-"): make
    for make in (healthy, recovered, failed, full_disk, stuck, large, ended)
}


def staged(name: str) -> Staged:
    """One of the jobs, which has come to its present state just now."""
    return JOBS[name](time.time() - _lasts_s(name))


@cache
def _lasts_s(name: str) -> float:
    return JOBS[name](0.0).now_s


if __name__ == "__main__":
    in_etcd = EtcdStore(sys.argv[1])
    for each in JOBS:
        staged(each).write(in_etcd)
    in_etcd.close()
