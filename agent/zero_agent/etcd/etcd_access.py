"""How this agent talks to etcd: endpoints, TLS and login, and what to do when that fails.

Must always hold: no password is on a command line, in a log or in an error; a refusal is one
message with the flag that mends it, and nothing is tried again; an etcd that is not there yet is
waited for, within a limit.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_agent.etcd.etcd_process import Found, probe
from zero_agent.etcd.rdzv_conf import RdzvConf
from zero_orchestrator.errors import SpecError, StoreError, StoreRefused, StoreUnavailable
from zero_orchestrator.store import retry

if TYPE_CHECKING:
    import tenacity

    from zero_orchestrator.store.etcd.client import EtcdStore

log = logging.getLogger("zero")


@dataclass(frozen=True, kw_only=True)
class Access:
    """How to reach etcd, and as whom."""

    endpoints: str
    timeout_s: float = 5.0
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    user: str | None = None
    password: str | None = field(default=None, repr=False)

    @property
    def is_secure(self) -> bool:
        """Whether anything but the endpoints was given."""
        return bool(self.ca or self.cert or self.key or self.user)

    @classmethod
    def of(cls, args: argparse.Namespace, conf: RdzvConf, endpoints: str) -> Access:
        """As the flags say; `--rdzv-conf` may name the files of TLS as well.

        Raises:
            SpecError: A file that cannot be read, or half of a pair.
        """
        access = cls(
            endpoints=endpoints,
            timeout_s=conf.read_timeout_s or cls.timeout_s,
            ca=readable("--etcd-ca", given("etcd-ca", args, conf)),
            cert=readable("--etcd-cert", given("etcd-cert", args, conf)),
            key=readable("--etcd-key", given("etcd-key", args, conf)),
            user=args.etcd_user or None,
            password=_password(args.etcd_password_file),
        )
        for one, other in PAIRS:
            check_pair(one, other, args, conf)
        check_authority(args, conf)
        return access

    @property
    def first(self) -> str:
        """The first endpoint, `HOST:PORT`.

        Raises:
            SpecError: Written wrongly.
        """
        _etcd()  # as silent as it is to stay
        from zero_orchestrator.store.etcd.connection import parse_endpoints

        try:
            return parse_endpoints(self.endpoints)[0]
        except SpecError as error:
            raise SpecError(f"--rdzv-endpoint={self.endpoints}: {error}") from error

    @contextlib.contextmanager
    def store(self) -> Iterator[EtcdStore]:
        """A store; what it refuses is explained in terms of our flags.

        Raises:
            StoreError: As the body; it cannot be reached, or does not let this user in.
        """
        etcd = _etcd()
        who = etcd.Credentials(
            user=self.user, password=self.password, ca=self.ca, cert=self.cert, key=self.key
        )
        store = etcd.EtcdStore(self.endpoints, timeout_s=self.timeout_s, credentials=who)
        try:
            yield store
        except StoreError as error:
            raise type(error)(explain(str(error), self.is_secure)) from error
        finally:
            store.close()

    def await_answer(self, ask: Callable[[], object], wait_s: float) -> None:
        """Return when etcd answers; that it does not yet is said once, at once.

        Args:
            ask: A question to it.
            wait_s: How long to go on asking.

        Raises:
            StoreUnavailable: It has not answered in time.
            StoreRefused: It said no, or no waiting could help.
        """

        def say(state: tenacity.RetryCallState) -> None:
            if state.attempt_number == 1 and state.outcome:
                why = explain(str(state.outcome.exception()), self.is_secure)
                log.warning("%s; trying again for %g s (--etcd-wait)", why, wait_s)

        def ask_once() -> None:
            try:
                ask()
            except StoreUnavailable as error:
                if mistake(str(error)):
                    raise StoreRefused(str(error)) from error
                raise

        retry.within(wait_s).copy(before_sleep=say)(ask_once)


def _etcd() -> Any:
    """The client, imported only when flags are right, and with gRPC told to be silent.

    Its errors come to us as exceptions; what it prints beside them helps nobody. The variable is
    read at the import, and is taken back before a worker could inherit it.
    """
    silent = {} if "GRPC_VERBOSITY" in os.environ else {"GRPC_VERBOSITY": "NONE"}
    os.environ.update(silent)
    try:
        return importlib.import_module("zero_orchestrator.store.etcd.client")
    finally:
        for name in silent:
            del os.environ[name]


_CLIENT_CERTIFICATE = (
    "etcd asks for a client certificate that it trusts: give --etcd-cert and --etcd-key"
)
_REMEDIES = {
    "certificate has expired": "the certificate has expired: renew it",
    "self signed certificate": "--etcd-ca is not the authority that signed etcd's certificate",
    "self-signed certificate": "--etcd-ca is not the authority that signed etcd's certificate",
    "unable to get local issuer": "--etcd-ca is not the authority that signed etcd's certificate",
    "certificate signature failure": "ZERO_JOIN_TOKEN is not that with which etcd was started",
    "CERTIFICATE_VERIFY_FAILED": "--etcd-ca does not vouch for etcd's certificate",
    "Hostname Verification": "the certificate is for another name: use that in --rdzv-endpoint",
    "CERTIFICATE_REQUIRED": _CLIENT_CERTIFICATE,
    "BAD_CERTIFICATE": _CLIENT_CERTIFICATE,
    "WRONG_VERSION_NUMBER": "etcd does not use TLS there: leave out --etcd-ca, or ZERO_JOIN_TOKEN",
    "invalid user ID or password": "check --etcd-user and --etcd-password-file",
    "user name is empty": "give --etcd-user and --etcd-password-file",
    "authentication is not enabled": "leave out --etcd-user",
    "permission denied": "grant the role of --etcd-user readwrite on the prefix /zero/, or with "
    "--rdzv-id=JOB on /zero/v1/JOB/, /zero/events/JOB/ and /zero/progress/JOB/",
}
"""What etcd or its TLS says, and what to do about it; the first that fits."""


def mistake(message: str) -> str:
    """What no waiting mends, as its remedy; empty: etcd may be there in a moment.

    An etcd that is being started looks like a closed port, a silent host or a name that nobody
    knows; certificates and logins stay as they were given.
    """
    return next((remedy for known, remedy in _REMEDIES.items() if known in message), "")


def explain(message: str, is_secure: bool) -> str:
    """An error of etcd with its remedy in terms of our flags."""
    remedy = mistake(message)
    if not remedy and ("cannot reach" in message or "did not answer" in message):
        remedy = "is it running there? --rdzv-endpoint names it"
        if not is_secure:
            remedy += ", and the job's ZERO_JOIN_TOKEN or --etcd-ca if it uses TLS"
        elif "Handshake read failed" in message:
            remedy += "; it may not use TLS: then leave out --etcd-ca and ZERO_JOIN_TOKEN"
    if not remedy:
        return message
    return f"{message.removesuffix('; is it running there?')}; {remedy}"


def check_is_etcd(args: argparse.Namespace) -> None:
    """Tell users of c10d, whose endpoint was a TCPStore yet to be opened, what is needed.

    Raises:
        StoreUnavailable: Nothing that is etcd answers at the first endpoint.
    """
    endpoint = args.rdzv_endpoint.partition(",")[0]
    if args.rdzv_backend == "c10d" and ":" in endpoint and probe(endpoint) is not Found.ETCD:
        raise StoreUnavailable(
            f"--rdzv-backend=c10d --rdzv-endpoint={endpoint}: no etcd answers there, and "
            "zero-agent meets in etcd, not in a TCPStore. Name an etcd; or, on one machine, leave "
            "out --rdzv-endpoint; or, for a fixed world, use --master-addr and --node-rank"
        )


PAIRS = (("etcd-cert", "etcd-key"), ("etcd-user", "etcd-password-file"))


def given(flag: str, args: argparse.Namespace, conf: RdzvConf) -> Any:
    """What a flag about etcd says, or --rdzv-conf in its place; None: nothing."""
    of_conf = getattr(conf, flag.removeprefix("etcd-"), None)
    return getattr(args, flag.replace("-", "_")) or of_conf


def check_pair(one: str, other: str, args: argparse.Namespace, conf: RdzvConf) -> None:
    """Raise SpecError if one of two flags is given without the other."""
    if bool(given(one, args, conf)) != bool(given(other, args, conf)):
        raise SpecError(f"--{one} and --{other}: give both, or neither")


def check_authority(args: argparse.Namespace, conf: RdzvConf) -> None:
    """Raise SpecError if there is a certificate, but none for etcd to be known by."""
    if given("etcd-cert", args, conf) and not given("etcd-ca", args, conf):
        raise SpecError("--etcd-cert: give --etcd-ca as well, who signed etcd's certificate")


def readable(flag: str, path: Path | None) -> Path | None:
    """The path itself, if there is one and it can be read. Raises SpecError."""
    if path is not None:
        _read(flag, path)
    return path


def _password(path: Path | None) -> str | None:
    """The first line of the file."""
    return (
        None
        if path is None
        else _read("--etcd-password-file", path).partition("\n")[0].rstrip("\r")
    )


def _read(flag: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise SpecError(f"{flag}={path}: cannot be read: {error}") from error
