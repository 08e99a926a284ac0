"""A Kubernetes API server as far as kubectl asks one for discovery, objects, and new ones.

Real HTTP for the real kubectl: discovery, get and list of what a test says is there, and create,
which is remembered. What it does not have: watches, changes, validation, rights.

Who calls it: tests of what `zero-ctl run` asks a cluster and gives it.

Source: the Kubernetes documentation, API concepts.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

Object = dict[str, Any]

KINDS = {
    "v1": {
        "nodes": ("Node", False),
        "namespaces": ("Namespace", False),
        "secrets": ("Secret", True),
        "configmaps": ("ConfigMap", True),
        "services": ("Service", True),
        "persistentvolumeclaims": ("PersistentVolumeClaim", True),
    },
    "apps/v1": {"statefulsets": ("StatefulSet", True)},
    "batch/v1": {"jobs": ("Job", True)},
    "policy/v1": {"poddisruptionbudgets": ("PodDisruptionBudget", True)},
    "networking.k8s.io/v1": {"networkpolicies": ("NetworkPolicy", True)},
    "storage.k8s.io/v1": {"storageclasses": ("StorageClass", False)},
}
"""Group and version -> resource -> its kind, and whether it is in a namespace."""
KUEUE = {"kueue.x-k8s.io/v1beta1": {"localqueues": ("LocalQueue", True)}}
CERT_MANAGER = {
    "cert-manager.io/v1": {"certificates": ("Certificate", True), "issuers": ("Issuer", True)}
}


class KubeApi:
    """The cluster: which kinds it knows and which objects it has."""

    def __init__(self, more_kinds: Object | None = None) -> None:
        self.kinds: Object = KINDS | (more_kinds or {})
        self.objects: dict[str, Object] = {"/version": {"gitVersion": "v1.32.0"}}
        """Path -> object."""
        self.created: list[Object] = []

    def add(self, one: Object, namespace: str = "default") -> None:
        """Let an object be there."""
        self.objects[self._path(one, namespace)] = one

    def answer(self, path: str) -> Object | None:
        """What a GET of a path gets; None: 404."""
        if path in ("/api", "/apis"):
            return self._versions(path)
        if path.startswith("/openapi/v3"):
            return self._openapi(path.removeprefix("/openapi/v3").lstrip("/"))
        if (group := path.removeprefix("/api/").removeprefix("/apis/")) in self.kinds:
            return self._resources(group)
        if path.rpartition("/")[2] in {name for names in self.kinds.values() for name in names}:
            items = [one for at, one in self.objects.items() if at.rpartition("/")[0] == path]
            return {"kind": "List", "apiVersion": "v1", "metadata": {}, "items": items}
        return self.objects.get(path)

    def create(self, collection: str, one: Object) -> Object:
        """What a POST of an object gets."""
        self.objects[f"{collection}/{one['metadata']['name']}"] = one
        self.created.append(one)
        return one

    def _path(self, one: Object, namespace: str) -> str:
        version, kind = one["apiVersion"], one["kind"]
        [(resource, namespaced)] = [
            (name, is_in) for name, (found, is_in) in self.kinds[version].items() if found == kind
        ]
        root = f"/apis/{version}" if "/" in version else f"/api/{version}"
        within = f"/namespaces/{namespace}" if namespaced else ""
        return f"{root}{within}/{resource}/{one['metadata']['name']}"

    def _versions(self, path: str) -> Object:
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        groups = []
        for version in self.kinds:
            if "/" in version:
                name, _, short = version.partition("/")
                one = {"groupVersion": version, "version": short}
                groups.append({"name": name, "versions": [one], "preferredVersion": one})
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}

    def _openapi(self, document: str) -> Object:
        """Enough for kubectl to see that this server validates, so that it need not."""
        roots = {
            version: f"apis/{version}" if "/" in version else "api/v1" for version in self.kinds
        }
        if not document:
            urls = {root: {"serverRelativeURL": f"/openapi/v3/{root}"} for root in roots.values()}
            return {"paths": urls}
        version = document.removeprefix("apis/").removeprefix("api/")
        group = version.rpartition("/")[0]
        paths = {
            f"/{document}/{name}": {
                "patch": {
                    "x-kubernetes-group-version-kind": {
                        "group": group, "version": version.rpartition("/")[2], "kind": kind
                    },
                    "parameters": [{"name": "fieldValidation", "in": "query"}],
                }
            }
            for name, (kind, _) in self.kinds[version].items()
        }  # fmt: skip
        return {"openapi": "3.0.0", "info": {"title": "k", "version": "1"}, "paths": paths}

    def _resources(self, version: str) -> Object:
        verbs = ["create", "get", "list", "patch"]
        resources = [
            {"name": name, "singularName": kind.lower(), "kind": kind,
             "namespaced": namespaced, "verbs": verbs}
            for name, (kind, namespaced) in self.kinds[version].items()
        ]  # fmt: skip
        return {"kind": "APIResourceList", "groupVersion": version, "resources": resources}


@contextlib.contextmanager
def served(api: KubeApi, directory: Path) -> Iterator[Path]:
    """The cluster at a free port of this machine, for as long as it is needed; its kubeconfig."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = api.answer(urlsplit(self.path).path)
            self._reply(404, _NOT_FOUND) if found is None else self._reply(200, found)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self._reply(201, api.create(urlsplit(self.path).path, json.loads(body)))

        def _reply(self, code: int, answer: Object) -> None:
            body = json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Quietly."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield _kubeconfig(directory, server.server_address[1])
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


_NOT_FOUND = {
    "kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound",
    "message": "not found", "code": 404,
}  # fmt: skip


def _kubeconfig(directory: Path, port: int) -> Path:
    path = directory / "kubeconfig"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "test", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "test",
    }
    path.write_text(yaml.safe_dump(config))
    return path
