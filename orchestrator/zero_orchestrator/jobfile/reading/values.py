"""Converters from the text in a job file to values: sizes, numbers, names, durations.

Must always hold: a converter returns a value that every renderer can write, or raises a
ValueError that names what to write instead.
"""

from __future__ import annotations

import re

from zero_contract.values import Size, parse_seconds
from zero_orchestrator.errors import SpecError
from zero_orchestrator.membership.spec import parse_nnodes

_LABEL = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
_COUNT = re.compile(r"(\d+(?:\.\d+)?)([MBT]?)")
_MILLIONS = {"": 1, "M": 10**6, "B": 10**9, "T": 10**12}
_ENDPOINT = re.compile(r"(\[[0-9a-fA-F:]+\]|[\w.-]+):(\d{1,5})")
_TRUTH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def at_least(size_bytes: float) -> Size:
    """The smallest whole number of Mi or Gi that is at least `size_bytes`."""
    gibibytes = -(-size_bytes // 2**30)
    return Size(f"{gibibytes:.0f}Gi" if size_bytes > 2**30 else f"{-(-size_bytes // 2**20):.0f}Mi")


def whole(text: str) -> int:
    """A whole number, 0 or more."""
    if not text.isdecimal():
        raise ValueError("is not a whole number; write one, such as 3")
    return int(text)


def positive(text: str) -> int:
    """A whole number, 1 or more."""
    if not (number := whole(text)):
        raise ValueError("must be 1 or more")
    return number


def seconds(text: str) -> float:
    """A number of seconds, 0 or more."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ValueError("is not a length of time; write seconds, such as 120")
    return value


def duration(text: str) -> str:
    """The text of a length of time, as the flags of `zero-agent` take it: `60`, `10m`."""
    parse_seconds(text)
    return text


def more_than_none(text: str) -> str:
    """The text of a length of time that is not zero."""
    if not parse_seconds(text):
        raise ValueError("write more than 0 seconds, such as 30")
    return text


def hang(text: str) -> str:
    """The time after which workers without a step are hung; or `auto`, or `off`."""
    if text not in ("auto", "off"):
        try:
            return more_than_none(text)
        except ValueError:
            raise ValueError("write seconds, such as 600, or 10m, or auto, or off") from None
    return text


def truth(text: str) -> bool:
    """A truth value: true, yes or on; false, no or off."""
    if text.lower() not in _TRUTH:
        raise ValueError("write true or false")
    return _TRUTH[text.lower()]


def cores(text: str) -> str:
    """CPU cores, as Kubernetes writes them: `4`, `500m`."""
    if re.fullmatch(r"\d+(\.\d+)?|\d+m", text) is None or float(text.rstrip("m")) == 0:
        raise ValueError("is not a number of cores; write 4, or 500m for half of one")
    return text


def cores_number(text: str) -> float:
    """The number of cores: `"500m"` -> 0.5."""
    return float(text[:-1]) / 1000 if text.endswith("m") else float(text)


def parameters(text: str) -> int:
    """The number of parameters of a model: `125M`, `7B`."""
    match = _COUNT.fullmatch(text)
    if match is None:
        raise ValueError("is not a number of parameters; write 125M or 7B")
    return round(float(match[1]) * _MILLIONS[match[2]])


def name(text: str) -> str:
    """A name that Kubernetes, Slurm, systemd and etcd all accept."""
    if _LABEL.fullmatch(text) is None:
        raise ValueError(
            "is not a name that every kind of cluster accepts; use at most 40 of a-z, 0-9 "
            "and '-', a letter first"
        )
    return text


def workers(text: str) -> str:
    """Processes per node: a number, or `auto`, `cpu` or `gpu`."""
    if text not in ("auto", "cpu", "gpu") and not (text.isdecimal() and int(text) > 0):
        raise ValueError("write a number from 1, or auto, cpu or gpu")
    return text


def endpoint(text: str) -> str:
    """Address of an etcd member: `HOST:PORT`."""
    match = _ENDPOINT.fullmatch(text)
    if match is None or not 0 < int(match[2]) < 65536:
        raise ValueError("is not an address of etcd; write HOST:PORT, such as etcd-0:2379")
    return text


def url(text: str) -> str:
    """A URL in an object store: `s3://BUCKET/PREFIX`."""
    if re.fullmatch(r"(s3|gs)://[^/\s]+(/\S*)?", text) is None:
        raise ValueError("is not a URL in an object store; write s3://BUCKET/PREFIX or gs://...")
    return text


def bounds(text: str) -> tuple[int, int]:
    """The least and the largest number of nodes: `"2:16"` -> (2, 16)."""
    try:
        return parse_nnodes(text)
    except SpecError as error:
        raise ValueError(str(error).partition(": ")[2]) from None


def one_of(*words: str) -> type[str]:
    """A converter that accepts only these words."""

    def convert(text: str) -> str:
        if text not in words:
            raise ValueError(f"write {', '.join(words[:-1])} or {words[-1]}")
        return text

    return convert  # type: ignore[return-value]
