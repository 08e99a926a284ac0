"""This agent's connection to etcd: endpoints, TLS and login, and the remedies when they fail.

No password is on a command line, in a log or in an error, and no worker inherits the join token. A
refusal is one message with the flag that remedies it.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import importlib
import logging
import os
import time
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_agent.etcd.etcd_process import asked
from zero_agent.etcd.rdzv_conf import RdzvConf
from zero_agent.node.scratch import Scratch
from zero_orchestrator.errors import SpecError, StoreError, StoreRefused, StoreUnavailable
from zero_orchestrator.store import retry
from zero_orchestrator.store.join_token import ENV_JOIN_TOKEN, TlsFiles, write_certificates

if TYPE_CHECKING:
    import tenacity

    from zero_orchestrator.store.etcd.client import EtcdStore

log = logging.getLogger("zero")

FAR_S = 300.0
"""The largest tolerated skew, that of Kerberos; S3 refuses signatures from 900 s."""
_CLOCK_TIMEOUT_S = 2.0
OPEN = (
    "the etcd of this job is open to every host that reaches {where}, and so is its secret: set "
    f"{ENV_JOIN_TOKEN} to the same random characters on all nodes"
)
"""A warning, if there is no join token."""


@dataclass(frozen=True, kw_only=True)
class Access:
    """The endpoints of etcd, and the credentials of this agent."""

    endpoints: str
    timeout_s: float = 5.0
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    user: str | None = None
    password: str | None = field(default=None, repr=False)

    @property
    def is_secure(self) -> bool:
        """Whether there is any certificate or user name."""
        return bool(self.ca or self.cert or self.key or self.user)

    @classmethod
    def of(cls, args: argparse.Namespace, conf: RdzvConf, endpoints: str) -> Access:
        """Make it from the flags; `--rdzv-conf` may name the files of TLS as well.

        Raises:
            SpecError: A file cannot be read, or half of a pair is missing.
        """
        password_file = args.etcd_password_file
        access = cls(
            endpoints=endpoints,
            timeout_s=conf.read_timeout_s or cls.timeout_s,
            ca=readable("--etcd-ca", given("etcd-ca", args, conf)),
            cert=readable("--etcd-cert", given("etcd-cert", args, conf)),
            key=readable("--etcd-key", given("etcd-key", args, conf)),
            user=args.etcd_user or None,
            password=None  # else the first line of the file
            if password_file is None
            else _read("--etcd-password-file", password_file).partition("\n")[0].rstrip("\r"),
        )
        for one, other in PAIRS:
            check_pair(one, other, args, conf)
        check_authority(args, conf)
        return access

    @property
    def first(self) -> str:
        """The first endpoint, `HOST:PORT`. Raises SpecError if --rdzv-endpoint is malformed."""
        _etcd()  # the first import sets gRPC's verbosity
        from zero_orchestrator.store.etcd.connection import parse_endpoints

        try:
            return parse_endpoints(self.endpoints)[0]
        except SpecError as error:
            raise SpecError(f"--rdzv-endpoint={self.endpoints}: {error}") from error

    def clock_offset_s(self) -> float | None:
        """Seconds that this clock is ahead of etcd's (negative: behind); None if it is not told.

        By the Date header of etcd's HTTP endpoint; an etcd that serves no HTTP there tells none.
        """
        own = (self.cert, self.key) if self.cert is not None and self.key is not None else None
        try:
            began_s = time.time()
            with asked(self.first, "/version", self.ca, own, _CLOCK_TIMEOUT_S) as answer:
                date = answer.getheader("Date")
            now_s = (began_s + time.time()) / 2  # etcd has answered somewhere between the two
            return None if date is None else now_s - parsedate_to_datetime(date).timestamp()
        except (OSError, http.client.HTTPException, ValueError):  # a warning is worth no failure
            return None

    @contextlib.contextmanager
    def store(self) -> Iterator[EtcdStore]:
        """A connection to etcd; errors in this context name the flag that remedies them.

        Raises:
            StoreError: Etcd cannot be reached, does not let this user in, or the body raised it.
        """
        etcd = _etcd()
        who = etcd.Credentials(
            user=self.user, password=self.password, ca=self.ca, cert=self.cert, key=self.key
        )
        store = etcd.EtcdStore(self.endpoints, timeout_s=self.timeout_s, credentials=who)
        try:
            yield store
        except StoreError as error:
            # The same class: by it a caller tells a store that was replaced from one that is away.
            raise type(error)(explain(str(error), self.is_secure)) from error
        finally:
            store.close()

    def await_answer(
        self, ask: Callable[[], object], wait_s: float, flag: str = "--etcd-wait"
    ) -> None:
        """Return when etcd answers, within `wait_s`, which `flag` sets.

        The first failure is logged at once.

        Raises:
            StoreUnavailable: Etcd has not answered in time.
            StoreRefused: Etcd refused, or waiting cannot help.
        """

        def log_first(state: tenacity.RetryCallState) -> None:
            if state.attempt_number == 1 and state.outcome:
                why = explain(str(state.outcome.exception()), self.is_secure)
                log.warning("%s; trying again for %g s (%s)", why, wait_s, flag)

        def ask_once() -> None:
            try:
                ask()
            except StoreUnavailable as error:
                if mistake(str(error)):  # a refusal, which `retry` does not repeat
                    raise StoreRefused(str(error)) from error
                raise

        retry.within(wait_s).copy(before_sleep=log_first)(ask_once)


def _etcd() -> Any:
    """Import the client, which is needed only if the flags are right, with gRPC's log off."""
    # gRPC's errors arrive as exceptions; its log repeats them. gRPC reads the variable at the
    # import, and no worker is to inherit it.
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
    "--rdzv-id=JOB on /zero/v1/JOB/, /zero/secret/JOB/, /zero/events/JOB/ and /zero/progress/JOB/",
}
"""Remedy by a part of the error of etcd or of TLS; the first entry that matches counts."""


def mistake(message: str) -> str:
    """The remedy of an error that waiting cannot cure; empty if etcd may answer in a moment."""
    # An etcd that is being started looks like a closed port, a host that does not answer or a name
    # that does not resolve; wrong certificates and logins stay wrong.
    return next((remedy for known, remedy in _REMEDIES.items() if known in message), "")


def explain(message: str, is_secure: bool) -> str:
    """An error of etcd with its remedy, in terms of the flags of zero-agent."""
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


PAIRS = (("etcd-cert", "etcd-key"), ("etcd-user", "etcd-password-file"))


def given(flag: str, args: argparse.Namespace, conf: RdzvConf) -> Any:
    """The value of a flag about etcd, or else that of --rdzv-conf; None if neither is given."""
    of_conf = getattr(conf, flag.removeprefix("etcd-"), None)
    return getattr(args, flag.replace("-", "_")) or of_conf


def check_pair(one: str, other: str, args: argparse.Namespace, conf: RdzvConf) -> None:
    """Raise SpecError if one of two flags is given without the other."""
    if bool(given(one, args, conf)) != bool(given(other, args, conf)):
        raise SpecError(f"--{one} and --{other}: give both, or neither")


def check_authority(args: argparse.Namespace, conf: RdzvConf) -> None:
    """Raise SpecError if there is a client certificate, but no authority for etcd's."""
    # Without an authority the connection is not encrypted, and no certificate is shown.
    if given("etcd-cert", args, conf) and not given("etcd-ca", args, conf):
        raise SpecError(
            "--etcd-cert: give --etcd-ca as well, the authority that signed etcd's certificate"
        )


def readable(flag: str, path: Path | None) -> Path | None:
    """Return the path unchanged. Raises SpecError if the file cannot be read."""
    if path is not None:
        _read(flag, path)
    return path


def _read(flag: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    # The latter: what is no UTF-8, such as a certificate in DER.
    except (OSError, ValueError) as error:
        raise SpecError(f"{flag}={path}: cannot be read: {error}") from error


def clock_complaint(offset_s: float | None) -> str:
    """A warning if the difference of two clocks is too large; empty if it is not."""
    # No decision of a job compares clocks, so a node with a wrong one still trains: --preflight
    # reports it, an agent warns and continues, since the wrong clock may be etcd's.
    if offset_s is None or abs(offset_s) <= FAR_S:
        return ""
    way = "ahead of" if offset_s > 0 else "behind"
    return (
        f"this machine's clock is {abs(offset_s) / 60:.0f} min {way} etcd's; set the wrong one of "
        "the two by NTP (`chronyc tracking`): certificates, logs and durations depend on it"
    )


@dataclass(frozen=True, kw_only=True)
class Joining:
    """The token and this process's certificates; both empty if no token was given."""

    token: str = ""
    tls: TlsFiles | None = None


@contextlib.contextmanager
def joined(
    args: argparse.Namespace, environ: MutableMapping[str, str], *, given: bool, wanted: bool
) -> Iterator[Joining]:
    """Take the token out of `environ`, and set the flags to the certificates made from it.

    Not if the user names certificates (`given`), or the etcd is not on the network (`wanted`).
    Children inherit the environment.

    Raises:
        SpecError: The token is too easy to guess.
    """
    token = environ.pop(ENV_JOIN_TOKEN, "")  # before any child can inherit it
    if not token or given or not wanted:
        yield Joining()
        return
    # If this process is killed, the next one removes the keys that it has left.
    with contextlib.closing(Scratch("zero-tls-")) as scratch:
        tls = write_certificates(scratch.path, token)
        args.etcd_ca, args.etcd_cert, args.etcd_key = tls.ca, tls.cert, tls.key
        yield Joining(token=token, tls=tls)
