"""Records of jobs as their agents would have written them: what the page is drawn from."""

import hashlib
import math
from dataclasses import replace

from zero_orchestrator.ctl.page.picture import Records
from zero_orchestrator.observe.events import Event
from zero_orchestrator.observe.goodput import Begins, Doing, Stepped, Use, to_record
from zero_orchestrator.observe.history import History, Saved
from zero_orchestrator.observe.pace import Quantiles, quantiles
from zero_orchestrator.observe.status import Condition, JobStatus, NodeRow
from zero_orchestrator.observe.timeline import Phase, Timeline

T0 = 1_795_446_000.0
"""When the jobs begin, seconds since the epoch."""
BATCH = 32
PARTS = {Use.USEFUL: 0.82, Use.STARTING: 0.09, Use.REFORMING: 0.06, Use.SAVING: 0.03}


def loss_at(step: int) -> float:
    return 0.6 + 3.6 * math.exp(-step / 900) + 0.25 * math.exp(-step / 30) * math.sin(step)


class Job:
    """A job, told step by step."""

    def __init__(self, nodes: int) -> None:
        self.names = [f"node-{number:03d}" for number in range(nodes)]
        if nodes <= 9:
            self.names = [f"node-{'abcdefghi'[number]}" for number in range(nodes)]
        self.members = self.names
        self.timelines = {
            name: Timeline(until_s=T0).begin(Phase.STARTING, T0) for name in self.names
        }
        self.history, self.events = History(), []
        self.round, self.now_s = 0, T0
        self.step_s = 0.0

    def tell(self, node: str, event: str, text: str, **facts) -> None:
        record = {"time": self.now_s, "node": node, "round": self.round, "event": event}
        self.events.append(Event(len(self.events) + 1, {**record, "text": text, **facts}))

    def mark(self, mark: Begins | Stepped) -> None:
        for name in self.members:
            self.timelines[name] = self.timelines[name].add(mark, self.now_s)

    def activate(self) -> None:
        self.round += 1
        there, most = len(self.members), len(self.names)
        text = f"round {self.round} begins with {there} of 1:{most} nodes, world size {there}"
        self.tell(self.names[0], "activate", text, nodes=self.members)
        for name in self.members:
            self.tell(name, "start", f"round {self.round}: this node runs its ranks")
        self.mark(Begins(at_ns=0, doing=Doing.RUNNING))

    def step(self, number: int, step_s: float) -> None:
        self.now_s += step_s
        self.step_s = step_s
        self.history = self.history.stepped(
            number,
            time_s=self.now_s,
            samples=BATCH * number,
            workers=len(self.members),
            loss=loss_at(number),
        ).with_duration(step_s)
        if self.timelines[self.members[0]].spans[-1].phase is not Phase.TRAINING:
            self.mark(Stepped(at_ns=0, step=number))

    def save(self, step: int, stall_s: float) -> None:
        self.now_s += stall_s
        self.mark(Stepped(at_ns=0, step=step, saving_ns=round(stall_s * 1e9)))
        tag = f"step-{step:09d}.g{self.round}.3fa9"
        digest = hashlib.sha256(tag.encode()).hexdigest()
        saved = Saved(step=step, tag=tag, time_s=self.now_s, samples=BATCH * step, digest=digest)
        times = {"stall_s": stall_s, "write_s": 9 * stall_s, "publish_s": 0.012}
        kept = replace(self.history.with_checkpoint(saved), kept=self.history.kept + step)
        kept = kept.with_times(step, size_bytes=1_498_112_000, **times)
        in_memory = replace(kept.checkpoints[-1], tag=f"global_step{step}", stall_s=stall_s / 4)
        self.history = replace(kept, in_memory=in_memory)

    def lose(self, node: str, step: int) -> None:
        first = self.names[0]
        self.now_s += 0.1
        self.tell(first, "exit", "rank 0: lost its peers", symptom=True)
        self.now_s += 0.2
        self.tell(first, "dead", f"the agent of node {node} is gone: its process has ended")
        self.members = [name for name in self.names if name != node]
        self.mark(Begins(at_ns=0, doing=Doing.FORMING, reached=step))
        self.now_s += 0.1
        self.tell(first, "interrupt", f"lost node {node}; restart 1 of 3")
        self.now_s += 0.8
        self.activate()
        self.now_s += 0.3
        self.restore()
        self.now_s += 0.2

    def join(self, node: str) -> None:
        self.timelines[node] = (
            Timeline(until_s=self.now_s - 4)
            .begin(Phase.STARTING, self.now_s - 4)
            .after(self.timelines[node])
        )
        self.tell(self.names[0], "yield", f"{node} joins")
        self.now_s += 0.2
        self.tell(self.names[0], "form", f"{node} joins")
        self.mark(Begins(at_ns=0, doing=Doing.FORMING))
        self.members, self.now_s = self.names, self.now_s + 0.6
        self.activate()
        self.now_s += 0.4

    def restore(self) -> None:
        last = self.history.checkpoints[-1]
        text = f"the workers resume from step {last.step}: checkpoint {last.tag} on disk"
        self.tell(self.names[0], "restore", text, step=last.step, tag=last.tag, in_memory=False)

    def quantiles(self, place: int) -> Quantiles:
        """How long the steps of a rank take; rank 2 is slow."""
        p50_s = self.step_s * (1.4 if place == 2 else 1.0)
        return Quantiles(count=25, p50_s=p50_s, p90_s=1.2 * p50_s, p99_s=1.5 * p50_s)

    def status(self, step: int) -> JobStatus:
        rows = tuple(
            NodeRow(
                node=name,
                condition=Condition.RUNNING,
                alive=True,
                first_rank=place,
                slots=1,
                address=f"10.0.{place // 250}.{place % 250}:29400",
                step=step,
                step_time_s=self.now_s,
                loss=loss_at(step),
                ranks={str(place): self.quantiles(place)},
            )
            for place, name in enumerate(self.members)
        )
        whole_ns = (self.now_s - T0) * 1e9 * len(self.names)
        last = self.history.checkpoints[-1]
        saved = {"step": last.step, "tag": last.tag, "samples": last.samples, "time": last.time_s}
        return JobStatus(
            job="demo",
            state="ACTIVE",
            round=self.round,
            now=f"round {self.round} runs on {len(self.members)} nodes",
            min_nodes=1,
            max_nodes=len(self.names),
            world_size=len(self.members),
            members=rows,
            restarts=1,
            restarts_spent=1,
            max_restarts=3,
            command=("train.py", "--token=hunter2"),
            checkpoint=saved,
            goodput=PARTS[Use.USEFUL],
            step_times=self.quantiles(0),
            run_step_times=quantiles(self.history.durations),
            time_ns=to_record({use: round(whole_ns * part) for use, part in PARTS.items()}),
        )


def disturbed(
    *, nodes: int = 4, steps: int = 76, step_s: float = 0.25, every: int = 10, fails_at: int = 33
) -> Records:
    """A job whose node 1 is lost at a step, whose survivors go on, and which the node joins again.

    Args:
        nodes: Number of nodes.
        steps: Number of steps, the last of which has just ended: the job runs.
        step_s: Duration of a step.
        every: Steps between two checkpoints.
        fails_at: The step after which node 1 is lost.
    """
    job = Job(nodes)
    job.now_s += 4.0
    job.activate()
    back_at = fails_at + max(15, steps // 5)
    for step in range(1, steps + 1):
        job.step(step, step_s)
        if step % every == 0:
            job.save(step, 0.4 * step_s)
        if step == fails_at:
            job.lose(job.names[1], step)
            for lost in range(step - step % every + 1, step + 1):
                job.now_s += step_s
                job.mark(Stepped(at_ns=0, step=lost))
        if step == back_at:
            job.join(job.names[1])
    text = f"rank 2 on {job.names[2]} computes 1.4 x slower since step {steps - 9}"
    job.tell(job.names[0], "straggler", text, rank=2, host=job.names[2], slow=True)
    timelines = {
        name: replace(timeline, until_s=job.now_s) for name, timeline in job.timelines.items()
    }
    return Records(
        status=job.status(steps), events=tuple(job.events), history=job.history, timelines=timelines
    )
