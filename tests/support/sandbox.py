"""A container without a runtime: a command in namespaces, with a root file system of its own.

As a container runtime gives it: process 1 of its own, an address of its own on the cluster's
bridge, a root that holds the image and the volumes and nothing else, no rights. Needs root, and
of programs util-linux, iproute2 and coreutils.

Source: unshare(1), ip-netns(8), mount(8).
"""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from zero_agent.node.process_control import children

_PROGRAMS = ("ip", "unshare", "setpriv", "mount", "env")
_BECOME = Path(__file__).with_name("become.py")
_DEVICES = ("null", "zero", "full", "random", "urandom")


def why_not() -> str | None:
    """What keeps this machine from running sandboxes, or None."""
    if os.geteuid() != 0:
        return "containers in network namespaces need root"
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    return f"needs {', '.join(missing)}" if missing else None


@dataclass(frozen=True, kw_only=True)
class Mount:
    """One volume in one container."""

    target: str
    source: Path | None = None
    """None: memory."""
    read_only: bool = False
    size_bytes: int = 0
    """Of memory."""


@dataclass(frozen=True, kw_only=True)
class Image:
    """What a container's root holds before the volumes come, and its entry point."""

    files: Mapping[str, Path]
    """Path in the container -> here; read-only."""
    entrypoint: Sequence[str] = ()
    path: str = "/usr/local/bin:/usr/bin:/bin"


@dataclass(frozen=True, kw_only=True)
class Container:
    """Everything that one container is made of."""

    hostname: str
    image: Image
    command: Sequence[str]
    environment: Mapping[str, str]
    mounts: Sequence[Mount]
    user: int
    group: int
    read_only_root: bool


class Bridge:
    """The cluster's network: a bridge on this machine, a namespace and an address per pod."""

    def __init__(self) -> None:
        self._id = secrets.token_hex(3)
        self.name = f"zb{self._id}"
        self._prefix = f"10.{200 + secrets.randbelow(50)}.{secrets.randbelow(250)}"
        self._pods: list[str] = []
        _ip("link", "add", self.name, "type", "bridge")
        _ip("address", "add", f"{self._prefix}.1/24", "dev", self.name)
        _ip("link", "set", self.name, "up")

    def attach(self) -> tuple[str, str]:
        """A new pod's network; its namespace and its address."""
        number = len(self._pods) + 2
        name = f"{self.name}-{number}"
        address, outside = f"{self._prefix}.{number}", self.cable(name)
        _ip("netns", "add", name)
        self._pods.append(name)
        inside = ("peer", "name", "eth0", "netns", name)
        _ip("link", "add", outside, "type", "veth", *inside)
        _ip("link", "set", outside, "master", self.name, "up")
        _ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
        _ip("-n", name, "link", "set", "eth0", "up")
        _ip("-n", name, "link", "set", "lo", "up")
        return name, address

    def cable(self, namespace: str) -> str:
        """The end of a pod's cable that is on the bridge."""
        return f"zv{self._id}-{namespace.rpartition('-')[2]}"

    def cut(self, namespace: str) -> None:
        """Pull a pod's cable: nothing arrives any more, and nobody is told."""
        _ip("link", "set", self.cable(namespace), "down")

    @property
    def processes(self) -> list[int]:
        """All that run in the pods' namespaces."""
        ask = [["ip", "netns", "pids", name] for name in self._pods]
        answers = [subprocess.run(one, check=True, capture_output=True).stdout for one in ask]
        return [int(pid) for answer in answers for pid in answer.split()]

    def close(self) -> None:
        for name in self._pods:
            # First the cable: a connection that was cut may keep the namespace for minutes.
            subprocess.run(["ip", "link", "delete", self.cable(name)], check=False)
            subprocess.run(["ip", "netns", "delete", name], check=False)
        _ip("link", "delete", self.name)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Sandbox:
    """A container that runs, or has run; it dies with the thread that started it.

    The kernel sees to that twice: the tests' thread is tied to `unshare`, that to process 1.
    """

    def __init__(self, container: Container, namespace: str, directory: Path) -> None:
        self.log = directory / "log"
        root = directory / "root"
        root.mkdir(parents=True)
        script = directory / "start.sh"
        script.write_text("\n".join(_set_up(container, root)))
        isolate = "unshare --mount --pid --uts --ipc --fork --kill-child --propagation private"
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                [
                    *("setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec", namespace),
                    *(*isolate.split(), "/bin/sh", str(script)),
                ],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd="/",
                start_new_session=True,
            )  # fmt: skip

    @property
    def exit_code(self) -> int | None:
        """None while it runs; 128 + N when signal N ended it."""
        code = self._process.poll()
        return 128 - code if code is not None and code < 0 else code

    def signal(self, number: signal.Signals) -> None:
        """To its process 1. The kernel drops what that has no handler for, SIGKILL excepted."""
        for pid in children(self._process.pid):
            os.kill(pid, number)

    def kill(self) -> None:
        """End everything in it at once: with its process 1 the kernel ends the whole namespace."""
        self.signal(signal.SIGKILL)
        self._process.kill()
        self._process.wait()


def _set_up(container: Container, root: Path) -> list[str]:
    """The shell commands that make the root, and become the container's command."""
    return [
        "set -eu",
        f"mount -t tmpfs -o mode=755 root {root}",
        f"hostname {container.hostname}",
        f"mkdir -p {root}/proc && mount -t proc proc {root}/proc",
        *(_bind(Path("/dev", name), f"{root}/dev/{name}") for name in _DEVICES),
        *(_bind(source, f"{root}{path}", "ro") for path, source in container.image.files.items()),
        *(_mount(one, f"{root}{one.target}") for one in container.mounts),
        *(_bind(source, f"{root}{path}", "ro") for path, source in _hidden(container)),
        f"mount -o remount,bind,ro {root}" if container.read_only_root else ":",
        "exec " + shlex.join(_become(container, root)),
    ]


def _hidden(container: Container) -> list[tuple[str, Path]]:
    """Files of the image below a volume: a checkout in /tmp, say, where a pod has its own /tmp."""
    volumes = tuple(f"{one.target}/" for one in container.mounts)
    return [
        (path, at) for path, at in container.image.files.items() if f"{path}/".startswith(volumes)
    ]


def _bind(source: Path, target: str, *options: str) -> str:
    make = "mkdir -p" if source.is_dir() else f"mkdir -p {Path(target).parent} && touch"
    bind = f"{make} {target} && mount --rbind {source} {target}"
    return f"{bind} && mount -o remount,bind,{','.join(options)} {target}" if options else bind


def _mount(mount: Mount, target: str) -> str:
    if mount.source is None:
        return (
            f"mkdir -p {target} && mount -t tmpfs -o mode=1777,size={mount.size_bytes} m {target}"
        )
    return _bind(mount.source, target, *(["ro"] if mount.read_only else []))


def _become(container: Container, root: Path) -> list[str]:
    """Without rights and any way to get some: a user that is not root drops what root has."""
    variables = [f"{name}={value}" for name, value in container.environment.items()]
    return [
        *("/usr/bin/env", "-i", *variables, sys.executable, "-I", "-S", str(_BECOME)),
        *(str(root), str(container.user), str(container.group)),
        *container.command,
    ]
