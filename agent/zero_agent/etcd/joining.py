"""Certificates from the job's join token (ZERO_JOIN_TOKEN) for this process.

Must always hold: no worker inherits the token; the certificates are removed with this process, or
by the next one if it was killed; certificates that the user names win over the token's.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass

from zero_agent.node.scratch import Scratch
from zero_orchestrator.store.join_token import ENV_JOIN_TOKEN, TlsFiles, write_certificates

OPEN = (
    "the etcd of this job is open to every host that reaches {where}, and so is its secret: set "
    f"{ENV_JOIN_TOKEN} to the same random characters on all nodes"
)
"""A warning, if there is no token."""


@dataclass(frozen=True, kw_only=True)
class Joining:
    """The token and this process's certificates; both empty if no token was given."""

    token: str = ""
    tls: TlsFiles | None = None


@contextlib.contextmanager
def joined(
    args: argparse.Namespace, environ: MutableMapping[str, str], *, given: bool, wanted: bool
) -> Iterator[Joining]:
    """Remove the token from the environment, and set the flags to the certificates made from it.

    Args:
        args: The flags; those of etcd's certificates are changed if there is a token.
        environ: The environment, which children inherit; the token is removed.
        given: Whether the user names certificates.
        wanted: Whether the etcd is on the network.

    Raises:
        SpecError: The token is too easy to guess.
    """
    token = environ.pop(ENV_JOIN_TOKEN, "")
    if not token or given or not wanted:
        yield Joining()
        return
    with contextlib.closing(Scratch("zero-tls-")) as scratch:
        tls = write_certificates(scratch.path, token)
        args.etcd_ca, args.etcd_cert, args.etcd_key = tls.ca, tls.cert, tls.key
        yield Joining(token=token, tls=tls)
