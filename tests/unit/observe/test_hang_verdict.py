"""Who is waited for when no rank takes a step."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.support.manual_clock import ManualClock
from tests.support.memory_store import MemoryStore
from tests.support.waiting import wait_for
from zero_agent.loop.observed.judging import Verdicts
from zero_contract.journal import Journal
from zero_orchestrator.membership.job_state import Members, Node, Snapshot
from zero_orchestrator.membership.spec import JobSpec
from zero_orchestrator.observe.detectors.detector import Evidence, Idle, Question
from zero_orchestrator.observe.detectors.hang import RankState, judge, states
from zero_orchestrator.observe.events import Publisher, verdicts_key
from zero_orchestrator.observe.stacks import Frame
from zero_orchestrator.observe.verdicts import Kind, from_item

LIBRARY = Frame(function="wait", file="/x/zero_comm/waiting.py", line=9)
STEP = Frame(function="main", file="/app/train.py", line=51)
READ = Frame(function="read", file="/app/data.py", line=33)


def state(rank, awaits="", *, begun=5, frames=(LIBRARY, STEP), **facts):
    return RankState(rank=rank, node=f"n{rank}", awaits=awaits, begun=begun, frames=frames, **facts)


def reading(rank, **facts):
    return state(rank, frames=(READ, STEP), **facts)


@pytest.mark.parametrize(
    ("ranks", "named", "text"),
    [
        (
            [state(0, "sums of 1"), reading(1), state(2, "sums of 1")],
            (1,),
            "rank 1 on n1 is in read (data.py:33); 2 ranks wait for it in sums of 1, from main "
            "(train.py:51)",
        ),
        (
            [
                state(0, "sums of 1"),
                state(1, begun=None, frames=(), problem="process 7 (python) in state T (stopped)"),
            ],
            (1,),
            "rank 1 on n1: process 7 (python) in state T (stopped); rank 0 on n0 waits for it "
            "in sums of 1, from main (train.py:51)",
        ),
        (
            [state(0, "a"), state(1, "a"), state(2, "b", frames=(LIBRARY, READ))],
            (2,),
            "the collectives differ: rank 2 on n2 waits in b, from read (data.py:33); 2 ranks wait "
            "in a, from main (train.py:51)",
        ),
        (
            [state(0, "a", turn=1), state(1, "a", turn=1), state(2, "a", turn=0)],
            (2,),
            "the collectives differ: rank 2 on n2 waits in a, from main (train.py:51); 2 ranks "
            "wait in a (number 2 of this name), from main (train.py:51)",
        ),
        (
            [state(0, "a"), state(1, "a")],
            (0, 1),
            "all ranks wait in a, from main (train.py:51): the network between them may be "
            "interrupted",
        ),
        (
            [
                state(0, begun=6, last="weights"),
                reading(1, begun=5),
                state(2, begun=6, last="weights"),
            ],
            (1,),
            "rank 1 on n1 is in read (data.py:33), and has not begun weights, as the others have",
        ),
        (
            [state(0, begun=0), state(1, begun=6, last="weights"), state(2, begun=None)],
            (0,),
            "rank 0 on n0 is in main (train.py:51), and has not begun weights, as the others have",
        ),
        (
            [state(0, begun=None), state(1, begun=None), reading(2, begun=None)],
            (2,),
            "rank 2 on n2 is in read (data.py:33); 2 ranks are in main (train.py:51)",
        ),
    ],
)
def test_who_is_waited_for_is_named_with_its_node_and_line(ranks, named, text):
    found = judge(ranks)
    assert found is not None
    assert (found.ranks, found.text) == (named, text)


@pytest.mark.parametrize("ranks", [[], [reading(0)], [reading(0), reading(1)]])
def test_ranks_that_do_the_same_are_no_verdict(ranks):
    assert judge(ranks) is None


def test_the_answers_of_the_nodes_say_what_each_rank_does():
    dump = 'Thread 0x1 (most recent call first):\n  File "/app/data.py", line 33 in read\n'
    wait = {"awaits": "sums of 1", "turn": 2, "begun": 7, "last": "sums of 1"}
    answers = {
        "b": {"ranks": [{"rank": 1, "pid": 7, "problem": "it does not write its stacks"}]},
        "a": {
            "ranks": [
                {"rank": None, "pid": 5, "text": dump},  # a process that is no worker
                {"rank": 0, "pid": 6, "text": dump, "wait": wait},
            ]
        },
    }
    assert states(answers) == [
        RankState(rank=0, node="a", frames=(READ,), **wait),
        RankState(rank=1, node="b", problem="it does not write its stacks"),
    ]


def post(handler):
    """Runs a handler at once."""
    return handler


def test_the_agents_of_all_nodes_learn_who_is_waited_for_until_steps_are_taken_again(tmp_path):
    store = MemoryStore(ManualClock())
    nodes = tuple(Node(id=f"n{rank}", incarnation="1", address="x", slots=1) for rank in range(2))
    round_1 = Snapshot(JobSpec(min_nodes=2, max_nodes=2), n=1, members=Members(nodes))
    dump = 'Thread 0x1 (most recent call first):\n  File "/app/{0}.py", line 33 in {0}\n'
    answers = {
        "n0": {"ranks": [{"rank": 0, "pid": 6, "text": dump.format("train")}]},
        "n1": {"ranks": [{"rank": 1, "pid": 7, "problem": "process 7 in state T (stopped)"}]},
    }
    made = []
    for node in nodes:
        publisher = Publisher(store, "gpt", node.id, "1", ManualClock())
        journal = Journal(node.id, None)
        found = Evidence(stacks=answers)
        one = Verdicts(publisher, journal, ManualClock(), post, lambda *asked, of=found: of)
        one.follow(round_1, store.grant(60))
        made.append((one, publisher))
    first, second = (one for one, _ in made)
    why = "rank 1 on n1: process 7 in state T (stopped); rank 0 on n0 is in train (train.py:33)"
    first.add(Idle(step=12, idle_s=16.0))
    wait_for(lambda: store.get(verdicts_key("gpt")), 60, "the verdict")
    assert first.why_stuck == why
    second.listen(16.0)
    wait_for(lambda: second.why_stuck, 60, "that the other agent has read it")
    assert second.why_stuck == why
    first.add(Idle(step=13, idle_s=None))
    second.listen(None)
    assert (first.why_stuck, second.why_stuck) == ("", "")
    for _, publisher in made:
        publisher.close()


def test_ranks_that_are_all_busy_for_an_hour_are_asked_a_few_times():
    """As in an evaluation: a thousand nodes answer with megabytes, which etcd keeps for an hour."""
    node = Node(id="n0", incarnation="1", address="x", slots=2)
    dump = 'Thread 0x1 (most recent call first):\n  File "/app/eval.py", line 33 in evaluate\n'
    ranks = [{"rank": rank, "pid": rank, "text": dump} for rank in range(2)]
    asked: list[float] = []

    def ask(question: Question, nodes: Sequence[str]) -> Evidence:
        asked.append(idle_s)
        return Evidence(stacks={"n0": {"ranks": ranks}})

    publisher = Publisher(MemoryStore(ManualClock()), "gpt", "n0", "1", ManualClock())
    one = Verdicts(publisher, Journal("n0", None), ManualClock(), post, ask)
    one.follow(Snapshot(JobSpec(min_nodes=1, max_nodes=1), n=1, members=Members((node,))), 1)
    for idle_s in range(16, 3600):
        one.add(Idle(step=12, idle_s=float(idle_s)))
        wait_for(lambda: not one._asking, 60, "the answer")
    publisher.close()
    assert asked == [16, 33, 67, 135, 271, 543, 1087, 2175]
    assert one.why_stuck == ""


@pytest.mark.parametrize("warming_up", [False, True])
def test_a_dead_link_is_named_with_both_addresses_and_nothing_is_said_of_collectives(
    warming_up,
):
    nodes = tuple(Node(id=f"n{i}", incarnation="1", address=f"10.0.0.{i}", slots=1) for i in (0, 1))
    store = MemoryStore(ManualClock())
    publisher = Publisher(store, "gpt", "n0", "1", ManualClock())
    dead = {frozenset({"n0", "n1"}): "10.0.0.1:7001 does not answer"}
    answer = Evidence(dead=dead)
    one = Verdicts(publisher, Journal("n0", None), ManualClock(), post, lambda *asked: answer)
    job = Snapshot(JobSpec(min_nodes=2, max_nodes=2), n=1, members=Members(nodes))
    one.follow(job, store.grant(60))
    one.add(Idle(step=12, idle_s=16.0, warming_up=warming_up))
    held = wait_for(lambda: from_item(store.get(verdicts_key("gpt"))), 60, "the verdict")
    publisher.close()
    assert [(one.kind, one.text) for one in held] == [
        (
            Kind.DEAD_LINK,
            "no step for 16 s, since step 12: the link between n0 (10.0.0.0) and n1 (10.0.0.1) is "
            "dead: 10.0.0.1:7001 does not answer",
        )
    ]


def test_a_first_step_that_takes_long_is_no_hang_while_all_links_answer():
    """It compiles, loads and warms up."""
    node = Node(id="n0", incarnation="1", address="x", slots=1)
    stopped = {"n0": {"ranks": [{"rank": 0, "pid": 7, "problem": "process 7 is stopped"}]}}
    asked: list[Sequence[str]] = []

    def ask(question: Question, nodes: Sequence[str]) -> Evidence:
        asked.append(nodes)
        return Evidence(stacks=stopped)

    publisher = Publisher(MemoryStore(ManualClock()), "gpt", "n0", "1", ManualClock())
    one = Verdicts(publisher, Journal("n0", None), ManualClock(), post, ask)
    one.follow(Snapshot(JobSpec(min_nodes=1, max_nodes=1), n=1, members=Members((node,))), 1)
    one.add(Idle(step=0, idle_s=16.0, warming_up=True))
    wait_for(lambda: asked, 60, "the question")
    publisher.close()
    assert one.why_stuck == ""
