"""Plays cert-manager for the local cluster: real certificates, by openssl, as Secrets.

Who calls it: tests that run manifests with cert-manager's objects in them, or a server with TLS.
"""

from __future__ import annotations

import base64
import subprocess
from pathlib import Path

from tests.support.pods import Object

_USAGES = {"server auth": "serverAuth", "client auth": "clientAuth"}


def issue(objects: list[Object], directory: Path) -> list[Object]:
    """The objects with a Secret in place of each Certificate, and without the Issuers.

    An issuer signs with the certificate in its `ca` Secret; one without signs for itself.
    """
    directory.mkdir()
    issuers = {o["metadata"]["name"]: o["spec"] for o in objects if o["kind"] == "Issuer"}
    certificates = [o["spec"] for o in objects if o["kind"] == "Certificate"]
    for spec in sorted(certificates, key=lambda one: not one.get("isCA", False)):
        signer = issuers[spec["issuerRef"]["name"]].get("ca", {}).get("secretName")
        sign(spec, signer, directory)
    made = [_secret(spec["secretName"], directory) for spec in certificates]
    return [o for o in objects if o["kind"] not in {"Issuer", "Certificate"}] + made


def sign(spec: Object, signer: str | None, directory: Path) -> None:
    """Make NAME.crt, NAME.key and NAME.ca of a certificate; without a signer it signs itself."""
    name = directory / spec["secretName"]
    extensions = [f"basicConstraints=critical,CA:{'TRUE' if spec.get('isCA') else 'FALSE'}"]
    if spec.get("dnsNames"):
        extensions.append("subjectAltName=" + ",".join(f"DNS:{one}" for one in spec["dnsNames"]))
    if spec.get("usages"):
        usages = ",".join(_USAGES[one] for one in spec["usages"])
        extensions.append(f"extendedKeyUsage={usages}")
    ca = directory / (signer or spec["secretName"])
    by = ["-CA", f"{ca}.crt", "-CAkey", f"{ca}.key"] if signer else []
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "1", "-subj", f"/CN={spec['commonName']}"),
            *("-keyout", f"{name}.key", "-out", f"{name}.crt", *by),
            *(word for one in extensions for word in ("-addext", one)),
        ],
        check=True, capture_output=True, timeout=30,
    )  # fmt: skip
    Path(f"{name}.ca").write_bytes(Path(f"{ca}.crt").read_bytes())


def _secret(name: str, directory: Path) -> Object:
    suffixes = {"tls.crt": "crt", "tls.key": "key", "ca.crt": "ca"}
    content = {
        key: (directory / f"{name}.{suffix}").read_bytes() for key, suffix in suffixes.items()
    }
    data = {key: base64.b64encode(value).decode() for key, value in content.items()}
    return {"kind": "Secret", "metadata": {"name": name}, "data": data}
