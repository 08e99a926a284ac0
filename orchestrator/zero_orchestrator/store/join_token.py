"""Certificates out of one secret: who knows a job's join token trusts, and is let in by, its etcd.

An etcd that we start for one job (`zero-ctl launch`, `--master-addr`, Slurm) is on the network, and
the job's keys, its secret among them, are in it. Every process of the job has the token in its
environment, and makes for itself what TLS needs: the key of the job's certificate authority is a
function of the token, so all have the same one and no file has to travel.

Must always hold: nothing but a process with the token gets in, or is taken for that etcd; a token
that could be guessed is refused, because a certificate lets guesses be tested. The dates of the
certificates are so far apart that no wrong clock matters: the token ends with the job.

Who calls it: the agent, the launcher and `zero-ctl`. The `cryptography` package makes the
certificates; it is imported only when there is a token.
"""

from __future__ import annotations

import argparse
import hmac
import ipaddress
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from zero_orchestrator.errors import SpecError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

ENV_JOIN_TOKEN = "ZERO_JOIN_TOKEN"
LEAST_CHARACTERS = 32
LOCAL_NAMES = ("127.0.0.1", "::1", "localhost")

_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
"""Of the group of P-256; a private key is a number from 1 to one less."""
_BEGIN, _END = datetime(2020, 1, 1, tzinfo=UTC), datetime(2120, 1, 1, tzinfo=UTC)
_AUTHORITY, _MEMBER = "zero-elastic job", "zero-elastic member"


@dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """What TLS needs at one end, PEM."""

    ca: Path
    cert: Path
    key: Path


def new_token() -> str:
    """One that nobody guesses."""
    return secrets.token_hex(32)


def check_token(token: str) -> str:
    """The token itself. Raises SpecError if it could be guessed."""
    if len(token) < LEAST_CHARACTERS:
        raise SpecError(
            f"{ENV_JOIN_TOKEN} has {len(token)} characters and could be guessed; write "
            f"{LEAST_CHARACTERS} random ones or more, such as those that `openssl rand -hex 32` "
            "prints"
        )
    return token


def write_certificates(directory: Path, token: str, names: Sequence[str] = ()) -> TlsFiles:
    """Make a key and its certificate, for this user alone to read.

    Args:
        directory: Exists, and holds none of them yet.
        token: Of the job.
        names: Host names and addresses under which a server is reached; none for a client.

    Raises:
        SpecError: The token could be guessed, or there is no room.
    """
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
    )

    # The authority's key is a function of the token that does not lead back to it. The digest has
    # twice as many bits as the order has, so that the remainder is as good as uniform.
    secret = check_token(token).encode()
    digest = hmac.new(secret, b"zero-elastic: authority of a job, 1", "sha512").digest()
    number = int.from_bytes(digest, "big") % (_ORDER - 1) + 1
    authority = ec.derive_private_key(number, ec.SECP256R1())
    own = ec.generate_private_key(ec.SECP256R1())
    contents = {
        "ca.pem": _certificate(_AUTHORITY, authority, authority).public_bytes(Encoding.PEM),
        "cert.pem": _certificate(_MEMBER, own, authority, names).public_bytes(Encoding.PEM),
        "key.pem": own.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    }
    try:
        for name, content in contents.items():
            descriptor = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
    except OSError as error:
        raise SpecError(f"{directory}: the job's certificates cannot be kept: {error}") from error
    ca, cert, key = (directory / name for name in contents)
    return TlsFiles(ca=ca, cert=cert, key=key)


def _certificate(
    subject: str,
    key: EllipticCurvePrivateKey,
    authority: EllipticCurvePrivateKey,
    names: Sequence[str] = (),
) -> x509.Certificate:
    """A certificate of the job's authority; for itself, if both keys are its own."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    def named(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    is_authority = key is authority
    builder = (
        x509.CertificateBuilder(named(_AUTHORITY), named(subject))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_BEGIN)
        .not_valid_after(_END)
        .add_extension(x509.BasicConstraints(is_authority, None), critical=True)
    )
    if names:
        alternatives: list[x509.GeneralName] = []
        for name in dict.fromkeys(names):
            try:
                alternatives.append(x509.IPAddress(ipaddress.ip_address(name.strip("[]"))))
            except ValueError:
                alternatives.append(x509.DNSName(name))
        extension = x509.SubjectAlternativeName(alternatives)
        builder = builder.add_extension(extension, critical=False)
    if not is_authority:  # a server of etcd's is a client as well: of its own gateway
        server = [ExtendedKeyUsageOID.SERVER_AUTH] if names else []
        usages = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH, *server])
        builder = builder.add_extension(usages, critical=False)
    return builder.sign(authority, hashes.SHA256())


def make_parser() -> argparse.ArgumentParser:
    """The command line of `zero-ctl certs`."""
    made = argparse.ArgumentParser(
        prog="zero-ctl certs",
        description=f"Make ca.pem, cert.pem and key.pem out of {ENV_JOIN_TOKEN}, for an etcd that "
        "lets in the processes of one job and nobody else (--trusted-ca-file, --cert-file, "
        "--key-file, --client-cert-auth).",
    )
    made.add_argument("directory", metavar="DIRECTORY", type=Path, help="directory to make")
    made.add_argument(
        "names", metavar="NAME", nargs="+", help="host names and addresses of that etcd"
    )
    return made


def main() -> None:
    """`zero-ctl certs`."""
    args = make_parser().parse_args()
    try:
        args.directory.mkdir(mode=0o700)
        names = (*LOCAL_NAMES, *args.names)
        write_certificates(args.directory, os.environ.get(ENV_JOIN_TOKEN, ""), names)
    except (OSError, SpecError) as error:
        make_parser().error(str(error))


if __name__ == "__main__":
    main()
