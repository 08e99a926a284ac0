"""Mutual TLS from one secret: processes that know a job's join token trust each other.

An etcd that is started for one job (`zero-ctl launch`, `--master-addr`, Slurm) is on the network,
and holds the job's keys, a secret among them. Every process of the job has the token in its
environment and makes its own TLS files. The private key of the job's certificate authority is
derived from the token, so all processes derive the same authority and no file is distributed.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from zero_contract.signing import Purpose, Secret, derive
from zero_orchestrator.errors import SpecError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

ENV_JOIN_TOKEN = "ZERO_JOIN_TOKEN"
LEAST_CHARACTERS = 32
LOCAL_NAMES = ("127.0.0.1", "::1", "localhost")

_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
"""Order of the group of P-256; a private key is a number from 1 to `_ORDER` - 1."""
# No wrong clock matters: the token ends with the job.
_BEGIN, _END = datetime(2020, 1, 1, tzinfo=UTC), datetime(2120, 1, 1, tzinfo=UTC)
_AUTHORITY, _MEMBER = "zero-elastic job", "zero-elastic member"


@dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """The TLS files of one process, PEM."""

    ca: Path
    cert: Path
    key: Path


def new_token() -> str:
    """A random token of 256 bits, in hexadecimal."""
    return secrets.token_hex(32)


def check_token(token: str) -> str:
    """Return the token. Raises SpecError if it is so short that it could be guessed."""
    if len(token) < LEAST_CHARACTERS:  # a certificate allows an offline test of each guess
        raise SpecError(
            f"{ENV_JOIN_TOKEN} has {len(token)} characters and could be guessed; write "
            f"{LEAST_CHARACTERS} random ones or more, such as those that `openssl rand -hex 32` "
            "prints"
        )
    return token


def write_certificates(directory: Path, token: str, names: Sequence[str] = ()) -> TlsFiles:
    """Write ca.pem, cert.pem and key.pem, readable by this user only, into an existing directory.

    `names`: host names and addresses of a server; empty for a client.

    Raises:
        SpecError: The token could be guessed, or the files cannot be written.
    """
    # Slow imports, for jobs that have a token.
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
    )

    # The authority's key is a function of the token that does not lead back to it. The two halves
    # have twice as many bits as the order has, so that the remainder is as good as uniform.
    secret = Secret(check_token(token))
    halves = (derive(secret, Purpose.AUTHORITY, half) for half in ("high", "low"))
    number = int("".join(halves), 16) % (_ORDER - 1) + 1
    authority = ec.derive_private_key(number, ec.SECP256R1())
    # Its own is random: no process can impersonate another one of the job.
    own = ec.generate_private_key(ec.SECP256R1())
    contents = {
        "ca.pem": _certificate(_AUTHORITY, authority, authority).public_bytes(Encoding.PEM),
        "cert.pem": _certificate(_MEMBER, own, authority, names).public_bytes(Encoding.PEM),
        "key.pem": own.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    }
    try:
        for name, content in contents.items():
            # O_EXCL: nothing is written through a link that another user has put there.
            descriptor = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
    except OSError as error:
        raise SpecError(
            f"{directory}: the job's certificates cannot be written: {error}"
        ) from error
    ca, cert, key = (directory / name for name in contents)
    return TlsFiles(ca=ca, cert=cert, key=key)


def _certificate(
    subject: str,
    key: EllipticCurvePrivateKey,
    authority: EllipticCurvePrivateKey,
    names: Sequence[str] = (),
) -> x509.Certificate:
    """A certificate signed by the job's authority; self-signed if `key` is `authority`."""
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
        # An address has a field of its own: clients do not look for it among the names.
        for name in dict.fromkeys(names):
            try:
                alternatives.append(x509.IPAddress(ipaddress.ip_address(name.strip("[]"))))
            except ValueError:
                alternatives.append(x509.DNSName(name))
        extension = x509.SubjectAlternativeName(alternatives)
        builder = builder.add_extension(extension, critical=False)
    if not is_authority:  # an etcd server is also a client: of its own gateway
        server = [ExtendedKeyUsageOID.SERVER_AUTH] if names else []
        usages = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH, *server])
        builder = builder.add_extension(usages, critical=False)
    return builder.sign(authority, hashes.SHA256())


def make_parser() -> argparse.ArgumentParser:
    """The command line of `zero-ctl certs`."""
    made = argparse.ArgumentParser(
        prog="zero-ctl certs",
        description=f"Make ca.pem, cert.pem and key.pem from {ENV_JOIN_TOKEN}, for an etcd that "
        "admits only the processes of one job. Start that etcd with --trusted-ca-file, "
        "--cert-file, --key-file and --client-cert-auth.",
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
        token = check_token(os.environ.get(ENV_JOIN_TOKEN, ""))  # before there is a directory
        args.directory.mkdir(mode=0o700)
        write_certificates(args.directory, token, (*LOCAL_NAMES, *args.names))
    except (OSError, SpecError) as error:
        make_parser().error(str(error))


if __name__ == "__main__":
    main()
