"""Every key has one purpose, and nothing is signed but with such a key."""

from __future__ import annotations

import ast
import typing
from collections import defaultdict
from functools import cache
from itertools import combinations
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from zero_contract.signing import Key, Purpose, Secret, derive, sign, verify

ROOT = Path(__file__).resolve().parents[3]
PRODUCT = [
    path for part in ("orchestrator", "agent", "engine") for path in (ROOT / part).rglob("*.py")
]
SECRET = Secret("the job's secret")

HOLDERS = {
    "engine/zero_checkpoint/saving/in_memory.py": {"Key"},  # the agent's reply
    "engine/zero_comm/worker/distributed.py": {"Key"},  # the environment of the worker
    "orchestrator/zero_contract/signing.py": {"Key"},
    "orchestrator/zero_orchestrator/membership/rendezvous.py": {"Secret"},  # etcd
    "orchestrator/zero_orchestrator/store/join_token.py": {"Secret"},  # the environment
}
"""Where text becomes a key or a secret; the type checker follows it from there."""


def test_no_two_purposes_share_a_key_and_none_is_the_secret():
    keys = [derive(SECRET, purpose, *more) for purpose in Purpose for more in ((), ("1",), ("2",))]
    assert len({SECRET, *keys}) == len(keys) + 1
    assert len({purpose.value for purpose in Purpose}) == len(Purpose)


def test_a_key_of_one_purpose_leads_to_no_key_of_another():
    """Neither as the parent of a key, nor by what it signs, whatever is to be signed."""
    keys = {purpose: derive(SECRET, purpose) for purpose in Purpose}
    for one, other in combinations(Purpose, 2):
        assert derive(keys[one], other) != keys[other]
        for text in (other.encode(), other.name.encode(), b"derive" + other.encode()):
            assert sign(keys[one], text).hex() != keys[other]
            assert sign(Key(SECRET), text).hex() != keys[other]


parts = st.lists(st.text(alphabet="ab\0 ", max_size=4), max_size=4)


@given(parts, parts)
def test_parts_have_borders(one, other):
    """`votes of round 1` in part `2/x` is not round `12` in part `/x`."""
    key = derive(SECRET, Purpose.ROUND)
    first, second = ([text.encode() for text in given] for given in (one, other))
    assert verify(key, sign(key, *first), *second) == (one == other)
    same = derive(SECRET, Purpose.VOTES, *one) == derive(SECRET, Purpose.VOTES, *other)
    assert same == (one == other)


@cache
def calls() -> list[tuple[Path, str, ast.Call]]:
    """What each module calls, by name."""
    return [
        (path, ast.unparse(each.func), each)
        for path in PRODUCT
        for each in ast.walk(ast.parse(path.read_text()))
        if isinstance(each, ast.Call)
    ]


def test_only_one_module_signs_and_derives():
    """Others compare tokens, and hash without a key."""
    found = {
        path.relative_to(ROOT).as_posix(): name
        for path, name, _ in calls()
        if name.startswith("hmac.") and name != "hmac.compare_digest"
    }
    assert found == {"orchestrator/zero_contract/signing.py": "hmac.new"}


def test_no_hash_takes_a_secret_or_a_key():
    for path, function, call in calls():
        if function.startswith("hashlib."):
            assert not {keyword.arg for keyword in call.keywords} & {"key", "salt", "person"}
            names = {n.id for n in ast.walk(call) if isinstance(n, ast.Name)}
            fields = {n.attr for n in ast.walk(call) if isinstance(n, ast.Attribute)}
            assert not (names | fields) & {"secret", "_secret", "token", "key", "_key"}, path


def test_whoever_signs_has_a_key_and_not_a_secret():
    """`make check` runs the type checker, for which a Secret is no Key."""
    for function in (sign, verify):
        assert typing.get_type_hints(function)["key"] is Key
    assert typing.get_type_hints(derive)["return"] is Key
    holders = defaultdict(set)
    for path, name, _ in calls():
        if name in {"Key", "Secret"}:
            holders[path.relative_to(ROOT).as_posix()].add(name)
    assert holders == HOLDERS
