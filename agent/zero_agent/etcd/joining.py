"""What a process of the job makes of the join token in its environment.

Must always hold: no worker inherits the token, and no certificate outlives this process for longer
than until the next one starts; certificates that the user names come before the token's. Who calls
it: `cli.py`; `meeting` and `local_etcd` are given what comes of it.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass

from zero_agent.node.scratch import Scratch
from zero_orchestrator.store.join_token import ENV_JOIN_TOKEN, TlsFiles, write_certificates


@dataclass(frozen=True, kw_only=True)
class Joining:
    """The token, and this process's certificate of it; neither, where none was given."""

    token: str = ""
    tls: TlsFiles | None = None


@contextlib.contextmanager
def joined(
    args: argparse.Namespace, environ: MutableMapping[str, str], *, given: bool, wanted: bool
) -> Iterator[Joining]:
    """Take the token out of the environment, and let the flags name the certificates of it.

    Args:
        args: The flags of etcd among others; changed where there is a token.
        environ: Of this process and all that it starts.
        given: The user names certificates.
        wanted: There is an etcd on the network to be reached.

    Raises:
        SpecError: The token could be guessed.
    """
    token = environ.pop(ENV_JOIN_TOKEN, "")
    if not token or given or not wanted:
        yield Joining()
        return
    with contextlib.closing(Scratch("zero-tls-")) as scratch:
        tls = write_certificates(scratch.path, token)
        args.etcd_ca, args.etcd_cert, args.etcd_key = tls.ca, tls.cert, tls.key
        yield Joining(token=token, tls=tls)
