"""What is said of a text from outside that is not what it has to be."""

from __future__ import annotations

import subprocess
import sys
import zlib
from dataclasses import dataclass, field
from enum import StrEnum

import pytest

from zero_contract.decoding import MalformedError, decode, encode, inflate
from zero_contract.worker import ContractError, Join, Progress
from zero_contract.worker import decode as message_of


class Kind(StrEnum):
    SMALL = "small"


@dataclass(frozen=True, kw_only=True)
class Record:
    n: int
    kind: Kind = Kind.SMALL
    rate: float | None = None
    inside: dict[str, tuple[Record, ...]] = field(default_factory=dict)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[]", "[] is not an object"),
        ("{}", "n: is missing"),
        ('{"n": "3"}', "n: '3' is not an integer"),
        ('{"n": true}', "n: True is not an integer"),
        ('{"n": NaN}', "n: nan is not an integer"),
        ('{"n": 1, "kind": "big"}', "kind: 'big': Invalid enum value 'big'"),
        ('{"n": 1, "rate": "a"}', "rate: 'a' is not a number or null"),
        (
            '{"n": 1, "inside": {"a": [{"n": 2}], "b.c": [{"n": 3}, {"n": null}]}}',
            "inside.b.c[1].n: None is not an integer",
        ),
        ('{"n": 1, "inside": {"a": [{"n": 2}], "b": [{}]}}', "inside.b[0].n: is missing"),
        ('{"n": 1, "n": 2}', "is not JSON: key 'n' is there twice"),
        (
            f'{{"n": 1{"0" * 60}}}',
            f"is not JSON: 1{'0' * 60} has more than 64 bits",
        ),
        ("[" * 100_000, "is nested too deeply"),
        (b"\xff", "is not JSON: 'utf-8' codec can't decode byte 0xff in position 0"),
        ("", "is not JSON: Expecting value"),
    ],
)
def test_an_error_names_the_place_the_value_and_the_remedy(text, problem):
    with pytest.raises(MalformedError) as wrong:
        decode(Record, text, "the record", remedy="write another one")
    said = str(wrong.value)
    assert said.startswith(f"the record: {problem}"), said
    assert said.endswith("; write another one")
    assert len(said) < 200


def test_a_record_is_read_as_it_was_written_and_what_is_new_in_it_is_ignored():
    record = Record(n=1, rate=float("inf"), inside={"a": (Record(n=2),)})
    assert decode(Record, encode(record), "the record") == record
    read = decode(Record, '{"n": 1, "later": {"n": []}}', "the record")
    assert read == Record(n=1)
    assert encode(read) == encode(Record(n=1))


def test_a_message_of_a_worker_has_the_types_that_the_contract_names():
    line = b'{"kind": "progress", "step": 3, "loss": NaN, "later": 1}'
    assert str(message_of(line)) == str(Progress(step=3, loss=float("nan")))
    for line, problem in (
        (b'{"kind": "progress", "step": "3"}', "step: '3' is not an integer"),
        (b'{"kind": "join", "round": 1, "env": {"A": "1", "B": 2}}', "env.B: 2 is not a string"),
        (b'{"kind": "jion", "round": 1}', "kind: 'jion': Invalid value 'jion'"),
    ):
        with pytest.raises(ContractError) as wrong:
            message_of(line)
        assert str(wrong.value) == f"not a message of the worker contract: {problem}"
    assert message_of(b'{"kind": "join", "round": 1, "env": {}}') == Join(round=1, env={})


def test_what_was_packed_small_is_not_unpacked_into_all_memory():
    packed = zlib.compress(bytes(1 << 24))
    assert inflate(packed, 1 << 24) == bytes(1 << 24)
    for damaged, limit in ((packed, (1 << 24) - 1), (packed[:-4], 1 << 24), (b"{}", 99)):
        with pytest.raises(ValueError, match=r"bytes|check"):
            inflate(damaged, limit)


AT_ONCE = """
import dataclasses, sys, threading
from zero_contract.decoding import decode
sys.setswitchinterval(1e-6)
FIELDS = [(f"f{n}", "int | None", dataclasses.field(default=None)) for n in range(20)]
for _ in range(100):
    inner = dataclasses.make_dataclass("Inner", FIELDS)
    kind = dataclasses.make_dataclass("Kind", [("inner", inner), *FIELDS])
    gate = threading.Barrier(4)
    def first():
        gate.wait()
        assert decode(kind, '{"inner": {"f1": 3}}', "a record").inner.f1 == 3
    threads = [threading.Thread(target=first) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_threads_that_are_the_first_to_decode_a_type_do_not_crash_the_process():
    """msgspec 0.22 shows them a class of which it does not know all: a segmentation fault."""
    done = subprocess.run([sys.executable, "-c", AT_ONCE], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
