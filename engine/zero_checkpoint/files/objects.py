"""Reading an object store through the interface of a directory: `ObjectPath` in place of `Path`.

It has those operations of `pathlib.Path` that look at checkpoints, with the same meaning, through
fsspec. Only an answer of the store means that an object is missing; any error is an OSError that
names the remedy.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from operator import itemgetter
from typing import Any

import fsspec

from zero_checkpoint.files.source import Source, Span
from zero_checkpoint.format.table import grouped

PROTOCOLS: Mapping[str, str] = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "memory": ""}
"""Protocol -> the extra of this distribution that brings its file system."""

_REQUEST_BYTES = 8 << 20
"""The most that one request fetches: large enough for its latency not to matter."""
_AHEAD_BYTES = 64 << 20
"""The most that is fetched concurrently, and held in memory until it is read."""


def file_system(url: str) -> Any:
    """The file system of a URL; fsspec keeps one for each process and protocol.

    The file system finds endpoint and credentials in its own way (AWS_ENDPOINT_URL, profiles,
    FSSPEC_S3_*, GOOGLE_APPLICATION_CREDENTIALS, ...).
    """
    # Listings are not cached, because other nodes write.
    return fsspec.filesystem(url.partition(":")[0], use_listings_cache=False)


@dataclass(frozen=True, slots=True)
class ObjectStat:
    """The members of `os.stat_result` that a store knows."""

    st_size: int
    st_mtime: float
    """Seconds since the epoch; 0 for a directory, which is no object."""

    @property
    def st_mtime_ns(self) -> int:
        """The same in nanoseconds."""
        return int(self.st_mtime * 1e9)


@dataclass(frozen=True, slots=True, order=True)
class ObjectPath:
    """A URL without a slash at its end. Every operation that asks the store raises OSError."""

    url: str
    _listed: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)
    """The entry of the listing that this path comes from: `is_dir` and `stat` answer from it."""

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> ObjectPath:
        return ObjectPath(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        """The last part."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> ObjectPath:
        """The path above; a bucket is its own parent."""
        above = self.url.rpartition("/")[0]
        return self if above.endswith("/") else ObjectPath(above)

    def with_name(self, name: str) -> ObjectPath:
        """Another path beside this one."""
        return self.parent / name

    def resolve(self) -> ObjectPath:
        """The same path: a store has no links."""
        return replace(self, _listed=None)

    def exists(self) -> bool:
        """Whether there is an object of this name, or any below it."""
        return self._ask() is not None

    def is_dir(self) -> bool:
        """Whether there is anything below this path."""
        info = self._info()
        return info is not None and info["type"] == "directory"

    def stat(self) -> ObjectStat:
        """Size and time of the last change; FileNotFoundError if there is nothing."""
        info = self._info()
        if info is None:
            raise os_error(FileNotFoundError(self.url), self.url)
        keys = ("LastModified", "mtime", "updated", "created")  # each file system has its own
        moments = (info.get(key) for key in keys)
        changed = next((each for each in moments if isinstance(each, datetime | int | float)), 0.0)
        changed_s = changed.timestamp() if isinstance(changed, datetime) else float(changed)
        return ObjectStat(int(info["size"] or 0), changed_s)

    def iterdir(self) -> Iterator[ObjectPath]:
        """The objects and directories directly below this path."""
        with as_os_errors(self.url):
            found = file_system(self.url).ls(self.url, detail=True)
        for info in found:
            name = str(info["name"]).rstrip("/").rpartition("/")[2]
            if name != self.name or info["type"] == "directory":  # not the marker of itself
                yield replace(self / name, _listed=info)

    def read_bytes(self) -> bytes:
        """All of an object."""
        with as_os_errors(self.url):
            return bytes(file_system(self.url).cat_file(self.url))

    def read_text(self, errors: str = "strict") -> str:
        """All of an object, as UTF-8."""
        return self.read_bytes().decode(errors=errors)

    @contextmanager
    def source(self) -> Iterator[Source]:
        """Open the object to read ranges of it."""
        yield _ObjectSource(self)

    def _info(self) -> Mapping[str, Any] | None:
        return self._listed or self._ask()

    def _ask(self) -> Mapping[str, Any] | None:
        # Not by fsspec's `exists` and `isdir`: these take every error for "no", and a run with
        # expired credentials would start from scratch.
        try:
            with as_os_errors(self.url):
                info: Mapping[str, Any] = file_system(self.url).info(self.url)
                return info
        except FileNotFoundError:
            return None


@dataclass(slots=True)
class _ObjectSource:
    """Ranges of one object; expected ranges are fetched concurrently."""

    path: ObjectPath
    later: Iterator[list[Span]] = field(default_factory=lambda: iter(()))
    fetched: dict[Span, memoryview] = field(default_factory=dict)

    def expect(self, spans: Sequence[Span]) -> None:
        self.later = grouped(spans, itemgetter(1), _AHEAD_BYTES)
        self._fetch_next()

    def _fetch_next(self) -> None:
        """Fetch the next group of expected ranges."""
        self.fetched = {}
        runs = list(_runs(next(self.later, [])))
        whole = [(run[0][0], sum(length for _, length in run)) for run in runs]
        for run, body in zip(runs, self._fetch(whole), strict=True):
            for begin, length in run:  # views: adjacent ranges are one request, and one body
                at = begin - run[0][0]
                self.fetched[begin, length] = memoryview(body)[at : at + length]

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> int:
        span = (offset, sum(map(len, buffers)))
        if not self.fetched:
            self._fetch_next()
        # Taken out: the memory of a body is free once all of its ranges are read.
        found = self.fetched.pop(span, None)
        data = memoryview(self._fetch([span])[0]) if found is None else found
        missing = span[1] - len(data)
        for buffer in buffers:
            part, data = data[: len(buffer)], data[len(buffer) :]
            buffer[: len(part)] = part
        return missing

    def _fetch(self, spans: Sequence[Span]) -> list[bytes]:
        if not spans:
            return []
        url, starts, ends = self.path.url, [s[0] for s in spans], [sum(s) for s in spans]
        with as_os_errors(url):
            bodies: list[bytes] = []
            found = file_system(url).cat_ranges([url] * len(spans), starts, ends)
            for item, start in zip(found, starts, strict=True):
                if not isinstance(item, Exception):
                    bodies.append(item)
                elif isinstance(item, OSError) and self.path.stat().st_size <= start:
                    bodies.append(b"")  # a store refuses a range that begins beyond the end
                else:
                    raise item
            return bodies


def _runs(spans: Sequence[Span]) -> Iterator[list[Span]]:
    """Adjacent ranges together, up to the size of one request."""
    run: list[Span] = []
    for begin, length in spans:
        if run and (begin != sum(run[-1]) or begin + length > run[0][0] + _REQUEST_BYTES):
            yield run
            run = []
        run.append((begin, length))
    if run:
        yield run


# ---- errors ----


@contextmanager
def as_os_errors(url: str) -> Iterator[None]:
    """Turn every error of a store into an OSError that names the remedy, see `os_error`."""
    try:
        yield
    except Exception as error:
        raise os_error(error, url) from error


def os_error(error: Exception, url: str) -> OSError:
    """An error of a store as an OSError: names the URL, what is wrong, and the remedy.

    Its errno is never EIO, with which a disk reports that it has lost data.
    """
    if isinstance(error, OSError) and error.filename == url:
        return error  # it is the result of an inner call
    signs: set[str] = set()
    cause: BaseException | None = error
    while cause is not None:
        response = getattr(cause, "response", None)
        code = response.get("Error", {}).get("Code", "") if isinstance(response, dict) else ""
        signs |= {type(cause).__name__, str(code)}
        cause = cause.__cause__ or cause.__context__
    for known, number, sentence in _REMEDIES:
        if known & signs:
            return OSError(number, sentence.format(error=_short(error)), url)
    return OSError(errno.EREMOTEIO, f"{type(error).__name__}: {_short(error)}", url)


_REMEDIES: tuple[tuple[frozenset[str], int, str], ...] = (
    (
        frozenset({"NoSuchBucket"}),
        errno.ENXIO,
        "there is no such bucket; create it, or mend the URL",
    ),
    (
        frozenset({"NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError"}),
        errno.EACCES,
        "there are no credentials ({error}); set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
        "AWS_PROFILE, or GOOGLE_APPLICATION_CREDENTIALS, or run under a role",
    ),
    (
        frozenset({"PermissionError", "RefreshError"}),
        errno.EACCES,
        "the store refuses ({error}); check the credentials, and that they allow to list, read, "
        "write and delete here",
    ),
    (
        frozenset({"EndpointConnectionError", "ClientConnectorError", "ConnectTimeoutError"}),
        errno.EHOSTUNREACH,
        "the store cannot be reached ({error}); check the network, and AWS_ENDPOINT_URL if the "
        "store is not Amazon's",
    ),
    (frozenset({"FileNotFoundError"}), errno.ENOENT, "there is no such object"),
    (frozenset({"FileExistsError"}), errno.EEXIST, "there is such an object already"),
)
"""Names of exceptions and codes of S3 -> errno and sentence. By name, because the libraries that
define the exceptions are installed only for the stores that need them."""


def _short(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).strip(" .")
