"""The TLS files of a client, which may be renewed while it runs.

They are read for each connection. A renewal that is under way (a file that is missing, half
written, or does not belong to the other) changes nothing: the next connection reads them again.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import grpc

from zero_orchestrator.errors import SpecError

_log = logging.getLogger(__name__)


class Certificates:
    """The certificates with which one client proves its identity, and those that it trusts."""

    def __init__(self, ca: Path, cert: Path | None, key: Path | None) -> None:
        """Read the files.

        Raises:
            SpecError: One cannot be read, or the certificate and the key are no pair.
        """
        self._files = (ca, cert, key)
        self._good = _read(*self._files)
        self._reported = ""

    def newest(self) -> grpc.ChannelCredentials:
        """The credentials in the files as they are now, or else as they were when last right."""
        try:
            self._good, self._reported = _read(*self._files), ""
        except SpecError as error:  # a renewal that is under way, perhaps
            if str(error) != self._reported:
                self._reported = str(error)
                _log.warning("%s; going on with the certificates of before", error)
        ca, cert, key = self._good
        return grpc.ssl_channel_credentials(ca, key, cert)


def _read(
    ca: Path, cert: Path | None, key: Path | None
) -> tuple[bytes, bytes | None, bytes | None]:
    """The contents of the files. Raises SpecError."""
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    trusted, _ = _parsed(ca, "certificate", x509.load_pem_x509_certificates)
    if cert is None or key is None:
        return trusted, None, None
    shown, chain = _parsed(cert, "certificate", x509.load_pem_x509_certificates)
    secret, private = _parsed(key, "key", lambda content: load_pem_private_key(content, None))
    if chain[0].public_key() != private.public_key():
        raise SpecError(f"{cert} is no certificate of the key in {key}: give two that are a pair")
    return trusted, shown, secret


def _parsed(path: Path, what: str, parse: Any) -> tuple[bytes, Any]:
    """The content of a file, and what it says."""
    # Parsed here, because gRPC ends the process at an empty file.
    try:
        content = path.read_bytes()
        return content, parse(content)
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError) as error:  # TypeError: the key has a password
        raise SpecError(f"{path} has no {what} in PEM, without a password") from error
