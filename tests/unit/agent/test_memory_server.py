"""A node's memory over real sockets: what is taken, what is given, and who is refused."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
import xxhash

from tests.support.listing import before_listing
from tests.support.waiting import wait_for
from zero_agent.node.memory import GRACE_S, MemoryServer, NodeMemory, sweep, used_bytes
from zero_contract import peer_memory
from zero_contract.handshake import CLIENT, SERVER, StrangerError, WireError, receive
from zero_contract.owned_dir import OWNER
from zero_contract.peer_memory import Get, PeerSession, Put, Reply
from zero_contract.signing import Purpose, Secret, derive
from zero_contract.worker import PeerMemoryRequest

SECRET = Secret("the job's secret")
KEY = derive(SECRET, Purpose.PEER_MEMORY)
BLOCK = 1000
DATA = os.urandom(3500)
FILE = "0123456789abcdef/step-000000007.g2.ab12/r00001.safetensors"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[MemoryServer]:
    one = MemoryServer(tmp_path, "127.0.0.1", KEY, budget_bytes=10_000)
    yield one
    one.close()


def put(data: bytes = DATA, path: str = FILE, **more: object) -> Put:
    blocks = [data[at : at + BLOCK] for at in range(0, len(data), BLOCK)]
    digests = "".join(f"{xxhash.xxh3_64_intdigest(block):016x}" for block in blocks)
    facts = {"path": path, "size_bytes": len(data), "block_bytes": BLOCK, "digests": digests}
    return Put(**{**facts, **more})


def offer(server: MemoryServer, wish: Put, data: bytes = DATA) -> Reply:
    """The last reply to a Put."""
    with closing(peer_memory.dial(server.address, KEY)) as session:
        session.send(wish)
        reply = session.receive_reply()
        if reply.ok:
            session.connection.sendall(data)
            reply = session.receive_reply()
        return reply


def get(server: MemoryServer, path: str, offset: int, length: int) -> bytes | str:
    with closing(peer_memory.dial(server.address, KEY)) as session:
        session.send(Get(path=path, offset=offset, length=length))
        reply = session.receive_reply()
        return receive(session.connection, reply.length) if reply.ok else reply.reason


def files(directory: Path) -> list[str]:
    """All but the mark of the owner."""
    found = (p for p in directory.rglob("*") if p.is_file() and p.name != OWNER)
    return sorted(str(p.relative_to(directory)) for p in found)


def test_a_copy_is_kept_whole_and_given_back_by_ranges(server, tmp_path):
    assert offer(server, put()) == Reply(ok=True)
    assert files(tmp_path) == [FILE]
    assert (tmp_path / FILE).read_bytes() == DATA
    for offset, length in [(0, 3500), (999, 1002), (3000, 9999), (4000, 5)]:
        assert get(server, FILE, offset, length) == DATA[offset : offset + length]


def test_a_copy_that_arrives_damaged_is_refused_and_leaves_nothing(server, tmp_path):
    damaged = bytearray(DATA)
    damaged[2345] ^= 1
    assert offer(server, put(), bytes(damaged)) == Reply(ok=False, reason="block 2 arrived damaged")
    assert files(tmp_path) == []


def test_a_copy_that_breaks_off_leaves_nothing(server, tmp_path):
    with closing(peer_memory.dial(server.address, KEY)) as session:
        session.send(put())
        assert session.receive_reply().ok
        session.connection.sendall(DATA[:2000])
        assert files(tmp_path) != []
    wait_for(lambda: files(tmp_path) == [], 60, "the sweep of what was begun")


def test_the_budget_counts_all_that_is_there_and_a_linked_file_once(server, tmp_path):
    (tmp_path / "buffer").write_bytes(bytes(6000))
    (tmp_path / "link").hardlink_to(tmp_path / "buffer")
    assert offer(server, put()).ok
    refused = offer(server, put(path=FILE.replace("r00001", "r00002")))
    assert not refused.ok
    assert (
        "exceed the budget of 0 MiB (checkpoint.ram.budget_bytes, --ram-budget)" in refused.reason
    )


@pytest.mark.parametrize(
    "path",
    [
        "../r00001.safetensors",
        f"/{FILE}",
        FILE.replace("0123456789abcdef", "../../../../etc"),
        FILE.replace("r00001", "../r00001"),
        FILE + "\n",
        FILE.replace("r00001.safetensors", ".r00001.safetensors.1234"),
        "zero-staging.job.r00000.1234",
    ],
)
def test_a_path_leads_to_files_of_checkpoints_and_nowhere_else(server, tmp_path, path):
    assert not offer(server, put(path=path)).ok
    assert "is not a file of a checkpoint" in str(get(server, path, 0, 10))
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    "wish",
    [
        put(size_bytes=1 << 62),
        put(block_bytes=1 << 40),
        put(block_bytes=0),
        put(size_bytes=0, digests=""),
        put(digests="zz" * 32),
        put(digests="00" * 8),
    ],
)
def test_sizes_that_do_not_fit_each_other_are_refused_before_anything_is_taken(
    server, tmp_path, wish
):
    assert not offer(server, wish).ok
    assert files(tmp_path) == []


def test_a_file_for_which_there_is_no_room_leaves_no_descriptor_and_no_file(tmp_path):
    """The limit of this process stands for that of a file system: the file exists by then."""
    most_bytes, block_bytes = 1 << 31, 64 << 20
    server = MemoryServer(tmp_path, "127.0.0.1", KEY, budget_bytes=4 * most_bytes)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, before[1]))
    try:
        digests = "00" * 8 * (2 * most_bytes // block_bytes)
        wish = put(size_bytes=2 * most_bytes, block_bytes=block_bytes, digests=digests)
        with closing(peer_memory.dial(server.address, KEY)) as session:
            session.send(wish)
            reply = session.receive_reply()
        assert (reply.ok, "File too large" in reply.reason) == (False, True)
        assert [link for link in open_links() if str(tmp_path) in link] == []
        assert files(tmp_path) == []
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        server.close()


ON_A_SMALL_DISK = """
import sys
from pathlib import Path
from zero_agent.node.memory import MemoryServer
from tests.unit.agent.test_memory_server import KEY, files, offer, put

directory, data = Path(sys.argv[1]), bytes(2_096_000)
server = MemoryServer(directory, "127.0.0.1", KEY, budget_bytes=1 << 30)
print(offer(server, put(data), data), files(directory))
"""


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="mounts a small disk")
def test_a_copy_whose_end_has_no_room_is_refused_and_leaves_nothing(tmp_path):
    """Others fill the memory of a machine as well; the kernel then writes a part, and no error."""
    small = 'mount -t tmpfs -o size=2000k none "$4" && exec "$@"'
    command = ["unshare", "-m", "sh", "-c", small, "sh", sys.executable, "-c", ON_A_SMALL_DISK]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, check=False)
    refused = Reply(ok=False, reason="there is no room for it")
    assert (done.stdout, done.stderr) == (f"{refused} []\n", "")


def open_links() -> list[str]:
    """What descriptors lead to, but for one that a thread closes meanwhile."""
    links = []
    for fd in open_descriptors():
        with suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return links


def open_descriptors() -> list[int]:
    names = os.listdir("/proc/self/fd")
    return [int(name) for name in names if os.path.lexists(f"/proc/self/fd/{name}")]


@pytest.mark.parametrize(
    "said",
    [b"\xff\xff\xff\xff", b"\x00\x00\x00\x02{}" + bytes(32), b"\x00\x00\x00\x01x" + bytes(32)],
)
def test_who_speaks_another_language_is_hung_up_on_and_others_are_served(server, said):
    with closing(peer_memory.dial(server.address, KEY)) as session:
        session.connection.sendall(said)
        assert session.connection.recv(1) == b""
    assert offer(server, put()).ok


@pytest.mark.parametrize("field", [{"offset": -1}, {"length": "9"}, {"length": True}])
def test_a_number_is_one_and_not_negative(field):
    record = {"path": FILE, "offset": 0, "length": 1, **field}
    near, far = socket.socketpair()
    with near, far:
        PeerSession(near, KEY, CLIENT).send(Get(**record))
        with pytest.raises(WireError):
            PeerSession(far, KEY, SERVER).receive()


def test_who_does_not_know_the_secret_is_neither_served_nor_believed(server, tmp_path):
    (tmp_path / FILE).parent.mkdir(parents=True)
    (tmp_path / FILE).write_bytes(DATA)
    with pytest.raises(OSError, match=r"hung up|reset"):
        peer_memory.dial(server.address, derive(Secret("another"), Purpose.PEER_MEMORY))
    with closing(socket.create_connection(server.address.split(":"), 5)) as stranger:
        theirs = receive(stranger, 16)
        stranger.sendall(theirs + bytes(32))  # no proof
        assert stranger.recv(100) == b""


def test_a_server_that_does_not_know_the_secret_gets_nothing():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        command = [sys.executable, "-c", _IMPOSTOR, str(listener.fileno())]
        with subprocess.Popen(
            command, pass_fds=[listener.fileno()], stdout=subprocess.PIPE
        ) as process:
            assert process.stdout.readline() == b"listens\n"  # who dials does not wait for long
            with pytest.raises(
                StrangerError, match=f"{address}: the other end does not know the job's"
            ):
                peer_memory.dial(address, KEY)
            process.kill()


_IMPOSTOR = """
import socket, sys
print("listens", flush=True)
connection, _ = socket.socket(fileno=int(sys.argv[1])).accept()
connection.sendall(bytes(16))
connection.recv(48)
connection.sendall(bytes(34))
connection.recv(1)
"""


# ---- whose memory it is ----

_AGENT = """
import sys, time
from pathlib import Path
from zero_agent.node.memory import NodeMemory
from zero_contract.worker import PeerMemoryRequest
ram = NodeMemory("job", sys.argv[1], "127.0.0.1", Path(sys.argv[2]))
print(ram.open(PeerMemoryRequest(request=1), "secret").directory, flush=True)
time.sleep(60)
"""


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Starts processes that hold a node's memory; `.directory` is where."""
    started = []

    def start(node: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", _AGENT, node, str(tmp_path)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        process.directory = Path(process.stdout.readline().strip())
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_what_a_killed_agent_has_left_is_swept_and_what_a_living_one_has_is_not(agent, tmp_path):
    dead, alive = agent("a"), agent("b")
    for directory in (dead.directory, alive.directory):
        (directory / "image").write_bytes(DATA)
    dead.send_signal(signal.SIGKILL)
    dead.wait()
    assert files(dead.directory) == files(alive.directory) == ["image"]
    sweep(tmp_path)
    assert not dead.directory.exists()
    assert files(alive.directory) == ["image"]


@pytest.mark.parametrize("secret", ["secret", "that of another run of this name"])
def test_what_a_crashed_agent_has_left_is_its_successors_in_the_same_run_of_the_job(
    agent, tmp_path, secret
):
    crashed, other = agent("a"), agent("a-b")
    for directory in (crashed.directory, other.directory):
        (directory / "image").write_bytes(DATA)
    for process in (crashed, other):
        process.kill()
        process.wait()
    ram = NodeMemory("job", "a", "127.0.0.1", tmp_path)
    assert files(crashed.directory) == ["image"], "it is there until a worker asks"
    directory = Path(ram.open(PeerMemoryRequest(request=1), secret).directory)
    assert (directory == crashed.directory) == (secret == "secret") == crashed.directory.exists()
    assert files(directory) == (["image"] if secret == "secret" else [])
    assert files(other.directory) == ["image"], "that is for the successor of another node"
    second = NodeMemory("job", "a", "127.0.0.1", tmp_path)
    assert second.open(PeerMemoryRequest(request=1), secret).directory != str(directory)
    for one in (ram, second):
        one.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("unused_s", "stays"), [(0.0, True), (GRACE_S + 1.0, False)])
def test_what_an_agent_of_another_job_has_left_is_swept_when_no_successor_came(
    agent, tmp_path, unused_s, stays
):
    crashed = agent("a")
    crashed.kill()
    crashed.wait()
    os.utime(crashed.directory, (0, time.time() - unused_s))
    ram = NodeMemory("another-job", "a", "127.0.0.1", tmp_path)
    assert crashed.directory.exists() == stays
    ram.close()
    assert crashed.directory.exists() == stays


def test_nothing_is_taken_before_a_worker_asks_and_all_is_given_back_at_the_end(tmp_path):
    ram = NodeMemory("my/job", "node 1", "127.0.0.1", tmp_path)
    assert list(tmp_path.iterdir()) == []
    first, second = (
        ram.open(PeerMemoryRequest(request=n, budget_bytes=9), "secret") for n in (1, 2)
    )
    assert (first.request, second.request, first.budget_bytes) == (1, 2, 9)
    assert (first.directory, first.address) == (second.directory, second.address)
    assert first.key == derive(Secret("secret"), Purpose.PEER_MEMORY)
    assert Path(first.directory).name.startswith("zero-ram.my-job.node-1.")
    ram.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("limit", "wanted", "budget"), [(7, None, 7), (7, 5, 5), (7, 9, 7), (None, 9, 9)]
)
def test_a_node_gives_no_more_memory_than_its_flag_and_no_more_than_the_config_asks_for(
    tmp_path, limit, wanted, budget
):
    ram = NodeMemory("job", "a", "127.0.0.1", tmp_path, limit_bytes=limit)
    assert (
        ram.open(PeerMemoryRequest(request=1, budget_bytes=wanted), "secret").budget_bytes == budget
    )
    ram.close()


def test_where_there_is_no_shared_memory_the_worker_is_told_so(tmp_path):
    ram = NodeMemory("job", "a", "127.0.0.1", tmp_path / "none")
    reply = ram.open(PeerMemoryRequest(request=1), "secret")
    assert reply.directory == ""
    assert reply.reason == f"{tmp_path}/none: No such file or directory"
    ram.close()


def test_a_checkpoint_that_is_freed_while_the_memory_is_counted_counts_no_more(tmp_path):
    """As often as the agent reports its memory, which its workers free after each step."""
    kept, freed = (tmp_path / "0123456789abcdef" / f"step-{n:09}.g1.ab12" for n in (7, 6))
    for directory in (kept, freed):
        directory.mkdir(parents=True)
        (directory / "r00000.safetensors").write_bytes(bytes(100))
    before_listing(freed, lambda: shutil.rmtree(freed))
    assert used_bytes(tmp_path) == 100
    assert not freed.exists()
