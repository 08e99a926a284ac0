"""A manifest is believed only when every byte of it is right and nothing in it is hostile."""

from __future__ import annotations

import hashlib
import json
import os

import numpy as np
import pytest

from tests.unit.checkpoint.support import adam_state, saved
from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.format.manifest import check_json, pack, unpack
from zero_checkpoint.format.parse import ManifestError, NewerFormatError, parse
from zero_checkpoint.format.table import TensorTable
from zero_checkpoint.loading.candidates import read_manifest


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    root = tmp_path_factory.mktemp("root")
    return (saved(root, adam_state(), 3) / "MANIFEST.json").read_bytes()


def signed(record: object) -> bytes:
    """A record with a digest that is right: what an attacker, or a bug, would write."""
    body = {k: v for k, v in record.items() if k != "digest"}
    return sign(json.dumps(body, separators=(",", ":")).encode())


def sign(body: bytes) -> bytes:
    digest = hashlib.sha256(body[1:]).hexdigest()
    return f'{{"digest":"{digest}",'.encode() + body[1:]


def changed(text: bytes, path: str, value: object) -> bytes:
    """The manifest with one value replaced, signed anew."""
    record = json.loads(text)
    is_packed = path.startswith("fragments.")
    if is_packed:
        record["fragments"] = lists_of(record["fragments"])
    *parents, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    target = record
    for key in parents:
        target = target[key]
    target[last] = value
    if is_packed:
        columns = record["fragments"].items()
        record["fragments"] = {name: pack(np.array(column), "<i8") for name, column in columns}
    return signed(record)


def lists_of(fragments: dict[str, str]) -> dict[str, list[int]]:
    return {name: unpack(column, "<i8").tolist() for name, column in fragments.items()}


def test_a_manifest_is_json_that_any_tool_can_read_and_check(text):
    record = json.loads(text)
    assert parse(text).digest == record["digest"]
    assert parse(signed(record)).step == 1


def test_no_bit_of_a_manifest_can_flip_unseen(text):
    for position in range(len(text)):
        damaged = bytearray(text)
        damaged[position] ^= 1 << (position % 8)
        with pytest.raises(ManifestError, match="own digest"):
            parse(bytes(damaged))


def test_no_prefix_of_a_manifest_is_a_manifest(text):
    for length in range(len(text)):
        with pytest.raises(ManifestError, match="own digest"):
            parse(text[:length])


def test_a_newer_format_is_refused_with_the_advice_to_upgrade(text):
    with pytest.raises(NewerFormatError, match=r"needs a reader of format 3.*upgrade zero-elastic"):
        parse(changed(text, "min_reader", 3))


def test_what_a_newer_writer_adds_for_newer_readers_is_ignored(text):
    assert parse(changed(changed(text, "format", 9), "news", {"a": 1})).step == 1


HOSTILE = {
    "a name that climbs out": ("files.0.name", "../../etc/passwd", "is '../../etc/passwd'"),
    "an absolute name": ("files.0.name", "/etc/passwd", "is '/etc/passwd'"),
    "the same file twice": ("files.1.name", "r00000.safetensors", "not 'r00001.safetensors'"),
    "a huge file": ("files.0.size_bytes", 2**63, "9223372036854775808 is more than"),
    "a negative size": ("files.0.size_bytes", -1, "size_bytes: -1 is less than 0"),
    "a size without digests": ("files.0.size_bytes", 2**50, "digests do not fit"),
    "a size that is no number": (
        "files.0.size_bytes",
        "9",
        "size_bytes: '9' is not an integer",
    ),
    "a truth value as number": ("step", True, "step: True is not an integer"),
    "a fraction as number": ("step", 1.0, "step: 1.0 is not an integer"),
    "an unaligned header": ("files.0.data_offset", 4097, "not a page"),
    "a header beyond the file": ("files.0.data_offset", 1 << 40, "not a page"),
    "digests that are no base64": ("files.0.xxh3_64", "!!", "not readable"),
    "half a digest": ("files.0.xxh3_64", "AAAA", "not readable"),
    "too few files": ("world", 4, "names 3 files for 4 ranks"),
    "no ranks": ("world", 0, "world: 0 is less than 1"),
    "a block of nothing": ("block_bytes", 0, "0 is less than 4096"),
    "a negative dimension": (
        "tensors.0.3",
        [-1, 11],
        ": -1 is less than 0",
    ),
    "a shape that overflows": ("tensors.0.3", [2**40, 2**40], "size in bytes"),
    "a shape that overflows behind a zero": ("tensors.3.3", [0, 2**59, 2**59], "size in bytes"),
    "an unknown dtype": ("tensors.0.2", "F3", "unknown dtype 'F3'"),
    "a tensor twice": ("tensors.1.1", "wte.weight", "is there twice"),
    "a kind with a slash": ("tensors.0.0", "a/b", "tensors\\[0\\]\\[0\\]: 'a/b'"),
    "a table that is no table": ("tensors", {}, "tensors: {} is not a list"),
    "a tie to nothing": ("aliases", {"a": "b"}, "no.*name of a stored tensor"),
    "a tie of a stored name": ("aliases", {"scale": "norm.bias"}, "name of a stored tensor"),
    "a fragment of no tensor": ("fragments.tensor.0", 99, "99, out of bounds"),
    "a negative tensor": ("fragments.tensor.0", -1, "-1, out of bounds"),
    "a fragment of no file": ("fragments.file.0", 3, "3, out of bounds"),
    "a negative start": ("fragments.start.0", -1, "-1, out of bounds"),
    "an empty fragment": ("fragments.length.0", 0, "0, out of bounds"),
    "a huge fragment": ("fragments.length.0", 2**62, "out of bounds"),
    "a fragment beyond its tensor": ("fragments.length.0", 10**6, "more than one place|beyond"),
    "a gap between fragments": ("fragments.length.0", 1, "is in no file"),
    "a fragment beyond the file": ("fragments.offset.0", 2**40, "gap|overlap"),
    "a fragment in the header": ("fragments.offset.0", 8, "overlap"),
    "overlapping bytes": ("fragments.file.1", 0, "overlap"),
    "columns of unequal length": ("fragments.offset", [4096], "differ in length"),
    "a nonce that is a path": ("nonce", "../a", "nonce: '../a'"),
    "meta that is a list": ("meta", [], "meta: \\[\\] is not an object"),
}
HOSTILE_PACKED = {
    "a column that is a list": ([], r"fragments.start: \[\] is not a string"),
    "a column that is no base64": ("!!", "is not readable"),
    "half a number": ("AAAA", "is not readable"),
}


@pytest.mark.parametrize("known", [False, True], ids=["", "known-table"])
@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_manifest_with_a_right_digest_is_refused(text, case, known):
    path, value, why = HOSTILE[case]
    here = known_here(text) if known else None
    with pytest.raises(ManifestError, match=why):
        parse(changed(text, path, value))
    del here


@pytest.mark.parametrize("case", HOSTILE_PACKED)
def test_a_column_that_is_not_packed_well_is_refused(text, case):
    record = json.loads(text)
    record["fragments"]["start"], why = HOSTILE_PACKED[case]
    with pytest.raises(ManifestError, match=why):
        parse(signed(record))


def known_here(text: bytes) -> TensorTable:
    """The table of a manifest, as that of a model in this process."""
    table = parse(text).tensors
    assert isinstance(table, TensorTable)
    return table


def test_a_table_that_the_process_has_is_not_made_again(text):
    here = known_here(text)
    assert parse(text).tensors is here
    again = TensorTable(here)
    assert again.text.encode() in text  # as in a process that has saved it
    assert parse(text).tensors is again


def test_what_only_looks_like_the_table_at_the_end_of_a_manifest_is_left_where_it_is(text):
    here, record = known_here(text), json.loads(text)
    looks_alike = {"step": 7, "tensors": record["tensors"], "world": 3}
    last = {key: value for key, value in record.items() if key not in ("meta", "tensors")}
    for meta in (looks_alike, {"inner": looks_alike}, {"words": ',"tensors":[],"world":3}'}):
        hidden = signed({**last, "tensors": record["tensors"][::-1], "meta": meta})
        found = parse(changed(text, "meta", meta))
        assert (found.tensors == here, found.meta) == (True, meta)
        with pytest.raises(ManifestError, match="fragments"):  # they are of the reversed table
            parse(hidden)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_file_is_no_manifest_and_is_not_read(tmp_path, make):
    make(path := tmp_path / "MANIFEST.json")
    with pytest.raises(ManifestError, match=r"MANIFEST.json: no regular file; not a manifest"):
        read_manifest(path)


def test_a_key_that_is_there_twice_is_refused(text):
    body = json.dumps({k: v for k, v in json.loads(text).items() if k != "digest"})
    with pytest.raises(ManifestError, match="key 'step' is there twice"):
        parse(sign(body.replace('"step": 1', '"step": 1, "step": 2').encode()))


def test_a_name_in_the_table_that_is_no_text_is_refused(text):
    body = b"{" + signed(json.loads(text)).partition(b",")[2]
    assert parse(sign(body)).step == 1
    with pytest.raises(ManifestError, match="not readable"):
        parse(sign(body.replace(b"wte.weight", b"wte\xff")))


@pytest.mark.parametrize("body", [b"{}", b"{[", b'{"a":' + b"[" * 100_000, b"{\xff", b"{1}"])
def test_a_right_digest_over_nonsense_is_refused(body):
    with pytest.raises(ManifestError):
        parse(sign(body))


def test_meta_that_json_cannot_hold_is_refused_with_the_name_of_its_key():
    with pytest.raises(CheckpointError, match=r"meta\.a\[1\]\.b is a set"):
        check_json({"a": [1, {"b": {1}}]}, "meta")
    with pytest.raises(CheckpointError, match="meta: key 3 is not text"):
        check_json({3: 1}, "meta")
    check_json({"a": [1, 2.5, None, True, "x", (1, 2)], "best": float("inf")}, "meta")
