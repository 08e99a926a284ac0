"""Facts about a cluster and the network that a job needs; `preflight` judges them.

A fact that could not be read (no rights, no such kind, no network) is None, never a guess.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

from zero_orchestrator.addresses import split_host_port
from zero_orchestrator.jobfile.reading.schema import JobFile

Object = dict[str, Any]

ASK_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 3.0
DOCKER_HUB = "registry-1.docker.io"


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Objects of a Kubernetes cluster that this user may read.

    None: the objects could not be read, or the job does not use them.
    """

    namespace: list[Object] | None
    """The namespace of the job; empty if it does not exist."""
    machines: list[Object] | None
    classes: list[Object] | None
    """Storage classes."""
    claim: list[Object] | None
    secret: list[Object] | None
    """The Secret with the files that log in to etcd."""
    bucket_secret: list[Object] | None
    """The Secret that opens the object store of the checkpoints."""
    secrets: Mapping[str, list[Object] | None]
    """Secrets by name, those of the keys `secrets` and `kubernetes.pull_secrets`."""
    priority_class: list[Object] | None
    queue: list[Object] | None
    has_kueue: bool | None
    has_cert_manager: bool | None
    job: list[Object] | None
    """A Job of the same name that exists already."""


def namespace_flags(namespace: str | None) -> list[str]:
    """Flags of kubectl for a namespace; none for that of the context."""
    return [f"--namespace={namespace}"] if namespace is not None else []


class Kubectl:
    """Queries of the cluster of kubectl's current context; each is bounded by `ASK_TIMEOUT_S`."""

    def __init__(self, namespace: str | None) -> None:
        self._flags = [f"--request-timeout={ASK_TIMEOUT_S:g}s", *namespace_flags(namespace)]

    def context(self) -> str | None:
        """Name of the current context; None without one, or without kubectl."""
        done = self._run("config", "current-context")
        return done.stdout.strip() or None if done is not None else None

    def why_unreachable(self) -> str | None:
        """The reason why the cluster does not answer; None if it answers."""
        done = self._run("get", "--raw=/version", *self._flags)
        if done is None:
            return "kubectl did not end in time"
        if done.returncode == 0:
            return None
        # Above the last line kubectl may have logged each attempt.
        said = done.stderr.strip() or f"kubectl ended with exit code {done.returncode}"
        return said.splitlines()[-1]

    def get(self, kind: str, name: str | None = None) -> list[Object] | None:
        """The objects of a kind, or the one of this name; empty if there is none.

        None if kubectl failed for another reason.
        """
        done = self._run("get", kind, *([name] if name else []), "--output=json", *self._flags)
        if done is None:
            return None
        if done.returncode == 0:
            found: Object = json.loads(done.stdout)
            return [found] if name else list(found["items"])
        # kubectl has one exit code for all failures, such as missing rights.
        return [] if "(NotFound)" in done.stderr else None

    def has_kind(self, kind: str) -> bool | None:
        """Whether the cluster has a kind such as `certificates.cert-manager.io`; None: unknown."""
        group = kind.partition(".")[2]
        done = self._run("api-resources", f"--api-group={group}", "--output=name", *self._flags)
        return None if done is None or done.returncode else kind in done.stdout.split()

    @staticmethod
    def _run(*words: str) -> subprocess.CompletedProcess[str] | None:
        if shutil.which("kubectl") is None:
            return None
        try:
            # Longer than kubectl itself waits, since it then says for what.
            return subprocess.run(
                ["kubectl", *words],
                capture_output=True, text=True, timeout=2 * ASK_TIMEOUT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return None


def ask(kubectl: Kubectl, file: JobFile) -> Cluster:
    """Query all facts about a cluster that matter to this job."""
    claim, secret, queue = file.checkpoint.claim, file.etcd.secret, file.kubernetes.queue
    namespace, bucket = file.kubernetes.namespace, file.checkpoint.secret
    priority = file.kubernetes.priority_class
    secrets = {reference.partition("/")[0] for reference in file.secrets.values()}
    secrets |= set(file.kubernetes.pull_secrets)
    return Cluster(
        namespace=kubectl.get("namespace", namespace) if namespace else None,
        machines=kubectl.get("nodes"),
        classes=kubectl.get("storageclasses"),
        claim=kubectl.get("persistentvolumeclaim", claim) if claim else None,
        secret=kubectl.get("secret", secret) if secret else None,
        bucket_secret=kubectl.get("secret", bucket) if bucket else None,
        secrets={name: kubectl.get("secret", name) for name in secrets},
        priority_class=kubectl.get("priorityclass", priority) if priority else None,
        queue=kubectl.get("localqueues.kueue.x-k8s.io", queue) if queue else None,
        has_kueue=kubectl.has_kind("localqueues.kueue.x-k8s.io") if queue else None,
        has_cert_manager=kubectl.has_kind("certificates.cert-manager.io")
        if file.etcd.tls
        else None,
        job=kubectl.get("job", f"{file.name}-train"),
    )


def why_no_etcd(endpoints: Sequence[str]) -> str | None:
    """The reason why no endpoint accepts a connection; None if one does."""
    reasons = []
    for endpoint in endpoints:
        try:
            socket.create_connection(split_host_port(endpoint), CONNECT_TIMEOUT_S).close()
        except UnicodeError:
            reasons.append(f"{endpoint}: is no name of a host")
        except OSError as error:
            reasons.append(f"{endpoint}: {error.strerror or error}")
        else:
            return None
    return "; ".join(reasons)


def registry_of(image: str) -> str | None:
    """Host of the registry of an image; None for a bare name, which may be a local image."""
    first, slash, _ = image.partition("/")
    if not slash:
        return None
    # As docker decides: any other first part is a user of its hub.
    return first if "." in first or ":" in first or first == "localhost" else DOCKER_HUB


def why_no_registry(registry: str) -> str | None:
    """The reason why a registry does not answer; None if it answers, even with a request to log in.

    Source: OCI Distribution Specification, "Determining Support": GET /v2/.
    """
    host = registry.partition(":")[0]
    # As docker: a registry on this machine needs no TLS.
    scheme = "http" if host in ("localhost", "127.0.0.1") else "https"
    try:
        with urllib.request.urlopen(f"{scheme}://{registry}/v2/", timeout=CONNECT_TIMEOUT_S):
            return None
    except urllib.error.HTTPError as error:
        return None if error.code in (401, 403) else f"it answers {error.code} to /v2/"
    except (OSError, HTTPException, ValueError) as error:  # it is no address, or no registry
        return str(getattr(error, "reason", error))
