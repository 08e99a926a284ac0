"""Keys and signatures: every key of a job has one purpose, and everything is signed in one way.

A secret is the root of keys: the job's (in etcd) or a join token. `derive` makes a key for one
`Purpose` of a secret, or of another key; `sign` and `verify` take keys. The two types make a
signature by a secret an error of the type checker. HMAC-SHA256 (RFC 2104) does both.
"""

from __future__ import annotations

import hmac
from enum import StrEnum
from typing import NewType

Secret = NewType("Secret", str)
"""Known to the agents of a job, or to whoever has its join token; never signs anything."""
Key = NewType("Key", str)
"""A key for one purpose, in hexadecimal; neither its parent nor another key follows from it."""

PROOF_BYTES = 32


class Purpose(StrEnum):
    """What a key is for."""

    RING = "liveness ring"
    PEER_MEMORY = "peer memory"
    MEMORY_NAME = "directory of in-memory checkpoints"
    RUN = "id of the job's run in its checkpoints"
    ROUND = "workers of a round"
    VOTES = "votes in one part of a round's store"
    SESSION = "records of one connection"
    AUTHORITY = "certificate authority of a job"


def derive(parent: Secret | Key, purpose: Purpose, *context: str) -> Key:
    """The key for a purpose, derived one-way, and for what the context names, such as a round."""
    return Key(_mac(parent, b"derive", *(part.encode() for part in (purpose, *context))).hex())


def sign(key: Key, *parts: bytes) -> bytes:
    """The signature of these parts, in this order and with these borders; `PROOF_BYTES` long."""
    return _mac(key, b"sign", *parts)


def verify(key: Key, proof: bytes, *parts: bytes) -> bool:
    """Whether `proof` is the signature of the parts, in constant time."""
    return hmac.compare_digest(proof, sign(key, *parts))


def _mac(key: str, use: bytes, *parts: bytes) -> bytes:
    # Begins with its use, and every part with its length: the inputs of `derive` and `sign` never
    # coincide, so what one purpose signs is no key and no signature of another.
    text = b"".join(len(part).to_bytes(8, "big") + part for part in (use, *parts))
    return hmac.new(key.encode(), text, "sha256").digest()
