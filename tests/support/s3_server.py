"""A real S3 server on the loopback: moto's, in a process of its own, on a free port.

It handles one request after the other, so that a conditional put is atomic, as S3 promises it.

    python tests/support/s3_server.py        prints the port, serves until stdin ends
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class S3Server:
    """A server that is up, and a bucket in it."""

    endpoint: str
    bucket: str

    @property
    def environment(self) -> dict[str, str]:
        """What leads a process here."""
        return {
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }

    def client(self) -> Any:
        """A client that is not ours, to look at what is there and to do harm."""
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id="test",
            aws_secret_access_key="test",
        )

    def uploads(self) -> list[str]:
        """The keys of uploads that were begun and not ended."""
        found = self.client().list_multipart_uploads(Bucket=self.bucket)
        return [upload["Key"] for upload in found.get("Uploads", ())]

    def check_credentials(self, wanted: bool) -> None:
        """From now on, refuse keys that the server does not know: it knows none."""
        allowed = "0" if wanted else "inf"
        url = f"{self.endpoint}/moto-api/reset-auth"
        plain = {"Content-Type": "text/plain"}
        request = urllib.request.Request(url, data=allowed.encode(), headers=plain)
        with urllib.request.urlopen(request, timeout=20):
            pass


@contextmanager
def s3_server(*flags: str) -> Iterator[S3Server]:
    """Run a server. With --forgetful it ignores conditions, as old ones do."""
    command = [sys.executable, "-W", "ignore", __file__, *flags]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        port = int(process.stdout.readline())
        server = S3Server(endpoint=f"http://127.0.0.1:{port}", bucket="bucket")
        try:
            server.client().create_bucket(Bucket=server.bucket)
            yield server
        finally:
            process.stdin.close()
            process.wait(20)


def _serve() -> None:
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    moto = DomainDispatcherApplication(create_backend_app)

    def forgetful(environ: dict[str, Any], start_response: Any) -> Any:
        environ.pop("HTTP_IF_NONE_MATCH", None)
        return moto(environ, start_response)

    server = make_server("127.0.0.1", 0, forgetful if "--forgetful" in sys.argv else moto)
    print(server.server_port, flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()


if __name__ == "__main__":
    # Python puts this file's directory first, where module names of other projects may be.
    sys.path = [entry for entry in sys.path if entry != str(Path(__file__).parent)]
    _serve()
