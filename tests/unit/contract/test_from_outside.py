"""Whatever comes from outside is accepted, or one of our errors: never another exception.

`FORMATS` has a real record of every format and its reader. A search changes the records: values of
other types, numbers without bounds, nesting without end, keys that are unknown, missing, twice or
in another order, text that ends early or has a byte that is wrong.
"""

from __future__ import annotations

import ast
import hashlib
import json
import tracemalloc
import zlib
from base64 import b85encode
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore

import zero_agent
import zero_checkpoint
import zero_engine
import zero_orchestrator
import zero_torch
from tests.support.packed import packed_zeros
from tests.unit.checkpoint.support import adam_state, saved
from zero_agent.etcd.etcd_process import Place
from zero_agent.workers.exits import read_error_file
from zero_checkpoint import StoreConsensus
from zero_checkpoint.format.parse import ManifestError
from zero_checkpoint.format.parse import parse as manifest_of
from zero_contract import peer_memory, worker
from zero_contract.decoding import MalformedError, decode, encode, line_of
from zero_contract.errors import ConfigError
from zero_contract.handshake import WireError
from zero_contract.worker import ContractError
from zero_engine.config import load_config
from zero_orchestrator.ctl import event_files, logs_command
from zero_orchestrator.ctl.page.picture import Records, picture, without_steps
from zero_orchestrator.ctl.views import event_line
from zero_orchestrator.errors import SpecError, SpecMismatch
from zero_orchestrator.jobfile.reading.reader import JobFileError
from zero_orchestrator.jobfile.reading.schema import load
from zero_orchestrator.membership.dead_links import DeadLink, LinkReport, SetAside
from zero_orchestrator.membership.failures import Charge, Exclusion
from zero_orchestrator.membership.job_state import (
    DrainOrder,
    Failure,
    Head,
    Members,
    Node,
    Published,
    State,
)
from zero_orchestrator.membership.records import LARGEST_BYTES
from zero_orchestrator.membership.spec import JobSpec
from zero_orchestrator.observe import events, history, pace, queries, stacks, timeline, verdicts
from zero_orchestrator.observe.events import Event
from zero_orchestrator.observe.recovery_trace import trace
from zero_orchestrator.observe.status import JobStatus
from zero_orchestrator.observe.story import selected
from zero_orchestrator.store.kv import KeyValue
from zero_torch.settings import read as read_settings

ROOT = Path(__file__).parents[3]
NODE = Node(id="a", incarnation="1", address="10.0.0.1", slots=2, topology="rack-1")
FEW_BYTES = 1 << 20
"""What a reader may need beside a multiple of the text that it reads."""


@dataclass(frozen=True)
class Format:
    """One format."""

    read: Callable[[bytes], object]
    errors: tuple[type[Exception], ...]
    samples: Sequence[str]
    write: Callable[[str], bytes] = str.encode
    """From the text that is changed to what is read: a digest is right, a job file is YAML."""


def record(*samples: Any) -> Format:
    """A record of the store."""
    kind = type(samples[0])
    return Format(kind.from_json, (SpecError,), [one.to_json() for one in samples])


def item(read: Callable[[KeyValue], object]) -> Callable[[bytes], object]:
    return lambda data: read(KeyValue("/key", data.decode(errors="replace"), 1, 1))


def signed(text: str) -> bytes:
    body = text.encode(errors="surrogatepass")[1:]
    return b'{"digest":"%s",' % hashlib.sha256(body).hexdigest().encode() + body


def as_yaml(text: str) -> bytes:
    try:
        return yaml.safe_dump(json.loads(text), sort_keys=False).encode(errors="surrogatepass")
    except (ValueError, RecursionError, yaml.YAMLError):
        return text.encode(errors="surrogatepass")


def read_vote(packed: bytes) -> object:
    """What rank 0 takes for the vote of rank 1."""
    store = HashStore()
    store.set("consensus/1/1", b"1 %d %b{}" % (len(packed), packed))  # type: ignore[arg-type]
    heard: list[object] = []
    StoreConsensus(store, 0, 2, timeout_s=0).ask({}, lambda votes: heard.extend(votes) or {})
    return heard[1]


MESSAGES = (
    worker.Progress(step=3, samples=24, loss=1.5, reduction="native"),
    worker.RankTimes(step=3, steps=2, compute_s=(1.0, 2.0), wait_s=(0.5, 0), slow_steps=(0, 1)),
    worker.Join(round=2, env={"RANK": "0", "ZERO_ROUND": "2"}),
    worker.Leave(round=2, when=worker.When.BOUNDARY, reason="a node joins", within_s=5.0),
    worker.Hello(rank=0, pid=7, can=("boundary", "rejoin"), round=1),
    worker.WaitReply(request=1, awaits="sum", collectives=({"state": "started", "id": 3},)),
)
WIRE = (
    peer_memory.Put(path="a", size_bytes=9, block_bytes=4, digests="00"),
    peer_memory.Get(path="a", offset=0, length=9),
    peer_memory.Reply(ok=False, reason="full"),
)
HISTORY = (
    history.History()
    .stepped(1, time_s=1.0, samples=8, workers=2, loss=2.5)
    .stepped(2, time_s=2.0, samples=16, workers=2, loss=2.25)
    .with_duration(0.5)
    .with_checkpoint(history.Saved(step=2, tag="t", time_s=2.5, samples=16, digest="d"))
    .with_failure(4, "no space left", 5.0)
)
PLACE = Place(name="a", host="a.lan", addresses=("10.0.0.1",), client_port=2379, peer_port=2380)
TIMELINE = timeline.Timeline(until_s=9.0).begin(timeline.Phase.STARTING, 1.0)
CONFIG = {
    "train_batch_size": 32,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.99]}},
    "elastic": {"reduction_block": 8},
    "checkpoint": {"async": True, "keep_last": 2},
}
BEGIN: dict[str, Any] = {"text": "x", "node": "a", "round": 2, "time": 4.5}
EVENTS: Sequence[dict[str, Any]] = (
    {**BEGIN, "event": "interrupt", "nodes": [], "idle_s": 0.5, "revision": 3},
    {**BEGIN, "event": "activate", "round": 3, "nodes": ["a", "b"], "revision": 4},
    {**BEGIN, "event": "start", "round": 3, "world_size": 4, "stopped_s": 4.0, "late_s": 0.5},
    {**BEGIN, "event": "restore", "tag": "t", "in_memory": True, "load_s": 0.5, "read_bytes": 9},
    {**BEGIN, "event": "first step", "round": 3, "ranks": {"0": [["loading", 1.5]]}},
    {**BEGIN, "event": "store", "away": False, "after_s": 2.5},
    {**BEGIN, "event": "stuck", "hosts": ["a"], "ranks": [1], "step": 3, "stuck": True},
    {**BEGIN, "event": "straggler", "rank": 1, "host": "a", "slow": True, "factor": 2.5},
    {**BEGIN, "event": "job time", "ns": {"idle": 3}, "missing": []},
)
AROUND = [
    KeyValue(f"/key{at}", json.dumps({**event, "time": float(at), "round": at // 2}), at, at)
    for at, event in enumerate((*EVENTS[:2], *EVENTS[:2], *EVENTS[:2]), start=1)
]
"""Three ends of rounds, each with the beginning of the next one."""


def shown(found: Sequence[Event]) -> None:
    """All that is made of events: lines, the report, and the trace of the recoveries."""
    for event in selected(found, since_s=1.0):
        event_line(event)
    job = JobStatus(job="gpt", state="ACTIVE", now="round 3 runs")
    records = Records(status=job, events=found, history=history.History(), timelines={})
    json.dumps(picture(records, now_s=99.0), allow_nan=False)
    line_of(trace(found, without_steps(records, now_s=99.0)))


FORMATS: dict[str, Format] = {
    "Message": Format(
        worker.decode, (ContractError,), [worker.encode(m).decode() for m in MESSAGES]
    ),
    "Record": Format(
        lambda data: decode(peer_memory.Record, data, "a record", WireError),
        (WireError,),
        [encode(one) for one in WIRE],
    ),
    "Node": record(NODE),
    "Members": record(Members((NODE,), 1), Members((NODE,) * 99)),
    "Head": record(Head(n=1, state=State.ACTIVE, cause="all are here", by="activate", at=1.5)),
    "Published": record(Published(step=3, tag="t", digest="d", samples=24, time=1.5)),
    "JobSpec": record(JobSpec(min_nodes=1, max_nodes=4, command=("train.py", "--lr=1"))),
    "Failure": record(Failure(node="a", symptom=False, summary="it died", rank=1, step=3)),
    "DrainOrder": record(DrainOrder("a", "1", "me")),
    "Charge": record(Charge(n=1, cause="it died", reached=3, workers=True)),
    "Exclusion": record(Exclusion(host="h", why="it failed", for_s=60)),
    "LinkReport": record(LinkReport(node="a", dead=(DeadLink(to="b", why="refused"),))),
    "SetAside": record(SetAside(node="a", why="dead links", others=("b",))),
    "Query": Format(
        queries.Query.from_json,
        (MalformedError,),
        [encode(queries.Query(number=1, kind="logs", arguments={"ranks": [0]}))],
    ),
    "Answer": Format(
        lambda data: queries.unpack(data.decode()),
        (ValueError,),
        [encode(queries.Answer(node="a", number=1, record={"host": "h"}))],
        lambda text: b85encode(zlib.compress(text.encode(errors="surrogatepass"))),
    ),
    "stacks": Format(
        lambda data: list(stacks.from_answer("a", json.loads(data))),
        (ValueError, RecursionError),
        [json.dumps({"host": "h", "ranks": [{"rank": 0, "pid": 7, "text": "", "spy": "[]"}]})],
    ),
    "output": Format(
        lambda data: decode(logs_command._Output, json.loads(data), "an answer"),
        (MalformedError, ValueError, RecursionError),
        [
            json.dumps(
                {
                    "agent": "1",
                    "number": 2,
                    "lost": False,
                    "chunks": [
                        {
                            "number": 2,
                            "time": 1.5,
                            "round": 1,
                            "rank": 0,
                            "stream": "stdout",
                            "text": "x",
                        }
                    ],
                }
            )
        ],
    ),
    "progress": Format(
        item(
            lambda one: [
                pace.from_record(of.get("pace")) for of in events.by_node("", [one]).values()
            ]
        ),
        (),
        [json.dumps({"step": 3, "time": 1.5, "pace": pace.to_record(pace.Pace(counts={3: 2}))})],
    ),
    "events": Format(
        item(lambda one: shown(events._in_order([*AROUND, one]))), (), [*map(json.dumps, EVENTS)]
    ),
    "seen": Format(item(events.seen_s), (), ['{"time": 1.5}']),
    "ledger": Format(item(events.read_goodput), (), ['{"ns": {"idle": 3}, "time": 1.5}']),
    "timeline": Format(
        item(events.read_timeline), (), [json.dumps({"timeline": timeline.to_record(TIMELINE)})]
    ),
    "history": Format(item(events.read_history), (), [json.dumps(history.to_record(HISTORY))]),
    "verdicts": Format(
        item(verdicts.from_item),
        (),
        [verdicts.to_value([verdicts.Verdict(kind=verdicts.Kind.STUCK, text="x", rank=1)])],
    ),
    "vote": Format(
        read_vote,
        (),
        [json.dumps([{"step": 3, "files": ["a"]}, {"manifest": 2}])],
        lambda text: zlib.compress(text.encode(errors="surrogatepass")),
    ),
    "config": Format(
        lambda data: load_config(data.decode()),
        (ConfigError, UnicodeDecodeError),
        [json.dumps(CONFIG)],
    ),
    "JobStatus": Format(
        lambda data: decode(JobStatus, data, "a status", SpecMismatch),
        (SpecMismatch,),
        [JobStatus(job="gpt", state="DONE", now="it has ended", world_size=2).to_json()],
    ),
    "Place": Format(
        lambda data: decode(Place, data, "a member", SpecError), (SpecError,), [encode(PLACE)]
    ),
    "list[str]": Format(
        lambda data: decode(list[str], data, "endpoints", SpecError),
        (SpecError,),
        [encode(["10.0.0.1:2379", "10.0.0.2:2379"])],
    ),
    "settings of protect": Format(
        lambda data: read_settings(json.loads(data)),
        (ConfigError, ValueError, RecursionError),
        [json.dumps({"elastic": {"seed": 3}, "checkpoint": {"ram": {"replicas": 1}}})],
    ),
}
"""By the name of the type that a reader passes to the decoder, or of what it reads."""
INSIDE = {
    "manifest": {"_Record", "_Reader"},
    "Members": {"_Rows"},
    "progress": {"Pace"},
    "seen": {"_Seen"},
    "ledger": {"_Ledger"},
    "history": {"History"},
    "verdicts": {"_Held"},
    "events": {"_Told"},
    "config": {"Config"},
    "vote": {"_Envelope"},
    "stacks": {"_Answer"},
    "output": {"_Output"},
    "settings of protect": {"Settings"},
}
"""Format -> the types that its reader passes to the decoder, where their names differ."""

VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1.5, 1e308, float("nan"), float("inf"), 2**63, -(2**70), 10**400),
    *("", "auto", "\ud800", "\0", "../x", "x" * 3000, "1e999", "9" * 5000),
    *([], {}, [[]], [None] * 100, {"later": 1}, {"": {"": {}}}, [{"kind": "put"}]),
)
TEXTS = (b"", b"\xff\xfe", b"{", b"null", b"3", b'"a"', b"[]", b"{}", b"NaN", b"[" * 50_000)
HALF = "\ud800"
"""Half of a character, which JSON can name and UTF-8 cannot encode."""


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container of a record with each of its keys."""
    if isinstance(value, dict | list):
        for key, inside in value.items() if isinstance(value, dict) else enumerate(value):
            yield value, key
            yield from places(inside)


def changed(text: str, random: Random) -> str:
    """A record with up to three changes."""
    found = json.loads(text)
    for _ in range(random.randint(0, 3)):
        if not (all_places := list(places(found))):
            break
        inside, key = random.choice(all_places)
        match random.randrange(5):
            case 0:
                del inside[key]
            case 1 if isinstance(inside, dict):
                inside[random.choice(["later", "kind", "step", "", "stpe"])] = deepcopy(
                    random.choice(VALUES)
                )
            case 2 if isinstance(inside, dict):
                entries = list(inside.items())
                random.shuffle(entries)
                inside.clear()
                inside.update(entries)
            case 3:
                inside[key] = [inside[key]]
            case _:
                inside[key] = deepcopy(random.choice(VALUES))
    made = json.dumps(found)
    match random.randrange(8):
        case 0:
            return made[: random.randrange(len(made) + 1)]
        case 1:
            return made.replace("{", '{"later": 1, "later": 2, ', 1)
        case 2:
            at = random.randrange(len(made) + 1)
            return made[:at] + random.choice('{}[]",:0-eN\\\ufffd') + made[at + 1 :]
    return made


@pytest.fixture(scope="module")
def formats(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Format]:
    """`FORMATS`, and those that are files."""
    root = tmp_path_factory.mktemp("outside")
    manifest = json.loads((saved(root, adam_state(), 3) / "MANIFEST.json").read_bytes())
    del manifest["digest"]
    job = yaml.safe_load((ROOT / "deploy/job.yaml").read_text())
    job["config"] = None

    def read_job(data: bytes) -> object:
        (root / "job.yaml").write_bytes(data)
        return load(root / "job.yaml")

    def read_error(data: bytes) -> object:
        (root / "error.json").write_bytes(data)
        return read_error_file(root / "error.json")

    def read_events(data: bytes) -> object:
        lines = [item.value.encode() for item in AROUND]
        (root / "gpt").mkdir(exist_ok=True)
        (root / "gpt/events-a.jsonl").write_bytes(b"\n".join([*lines, data]))
        records = event_files.read(root, "gpt")
        return shown(records.events), records.status.to_json()

    failed = {"message": "it died", "extraInfo": {"py_callstack": "line 3", "permanent": True}}
    files = {
        "event file": Format(read_events, (), [*map(json.dumps, EVENTS)]),
        "error file": Format(read_error, (), [json.dumps({"message": failed})]),
        "manifest": Format(manifest_of, (ManifestError,), [json.dumps(manifest)], signed),
        "job file": Format(read_job, (JobFileError,), [json.dumps(job, default=str)], as_yaml),
    }
    return {**FORMATS, **files}


NAMES = (*FORMATS, "manifest", "job file", "error file", "event file")


@pytest.mark.parametrize("name", NAMES)
def test_a_real_record_is_read(formats: dict[str, Format], name: str) -> None:
    one = formats[name]
    for text in one.samples:
        one.read(one.write(text))


def test_an_event_as_agents_write_it_has_all_of_its_fields():
    first = {**BEGIN, "event": "start", "stopped_s": None, "rank": None}
    written = [*EVENTS, first]
    assert [events.parse(json.dumps(event)) for event in written] == written


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=50)
@given(seed=st.integers(0, 2**32))
def test_a_changed_record_is_accepted_or_one_of_our_errors(
    formats: dict[str, Format], name: str, seed: int
) -> None:
    one, random = formats[name], Random(seed)
    data = one.write(changed(random.choice(one.samples), random))
    if random.randrange(8) == 0 and data:
        at = random.randrange(len(data))
        data = data[:at] + bytes([random.randrange(256)]) + data[at + 1 :]
    check(one, data)


@pytest.mark.parametrize("name", NAMES)
def test_half_of_a_character_in_any_place_is_accepted_or_one_of_our_errors(
    formats: dict[str, Format], name: str
) -> None:
    for text in formats[name].samples:
        for place in range(len(list(places(json.loads(text))))):
            found = json.loads(text)
            inside, key = list(places(found))[place]
            inside[key] = HALF
            check(formats[name], formats[name].write(json.dumps(found)))


@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_record_at_all_is_one_of_our_errors(
    formats: dict[str, Format], name: str
) -> None:
    for data in TEXTS:
        check(formats[name], data)
        if name == "manifest":
            check(formats[name], signed(data.decode(errors="replace")))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "job file"])
def test_a_reader_needs_no_more_memory_than_its_text_accounts_for(
    formats: dict[str, Format], name: str
) -> None:
    one = formats[name]
    bomb = b85encode(packed_zeros(4 * LARGEST_BYTES >> 20)).decode()
    for text in (
        one.samples[0],
        "[" * 20_000,
        json.dumps({"zlib": bomb}),
        json.dumps([0] * 50_000),
    ):
        data = one.write(text)
        tracemalloc.start()
        try:
            check(one, data)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        unpacked = 3 * LARGEST_BYTES if "zlib" in text else 0
        assert peak < 400 * len(data) + FEW_BYTES + unpacked, (len(data), text[:20])


def check(one: Format, data: bytes) -> None:
    """Read it; an error does not repeat all that it was given."""
    said = ""
    try:
        one.read(data)
    except one.errors as error:
        said = str(error)
    assert len(said) < 4000 + len(data)


def test_no_type_is_decoded_that_the_search_does_not_know() -> None:
    """The first argument of every call of the decoder, and the class of every `from_json`."""
    found = set()
    packages = zero_agent, zero_orchestrator, zero_checkpoint, zero_engine, zero_torch
    for package in (*packages, peer_memory, worker):
        top = Path(str(package.__file__))
        for path in top.parent.rglob("*.py") if top.name == "__init__.py" else [top]:
            found |= set(decoded(ast.parse(path.read_text())))
    assert found - {"kind", "cls", "str", "dict[str, Any]", "dict[str, str]"} <= {*FORMATS}.union(
        *INSIDE.values()
    )
    assert INSIDE.keys() <= {*NAMES}


def decoded(tree: ast.Module) -> Iterator[str]:
    reads = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and node.module in ("zero_contract.decoding", "zero_orchestrator.membership.records")
        for alias in node.names
        if alias.name in ("decode", "read", "kept")
    }
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=name), args=[kind, *_]) if name in reads | {"_decode"}:
                yield ast.unparse(kind)
            case ast.Call(
                func=ast.Attribute(value=ast.Name("decoding" | "_DECODER"), attr="decode"),
                args=[kind, *_],
            ):
                yield ast.unparse(kind)
            case ast.Attribute(value=ast.Name(id=name), attr="from_json"):
                yield name
