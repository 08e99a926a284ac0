"""The commands of a launch, while they run: what they print, and when the session ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import IO

import pytest

from tests.support.cluster import environment

pytestmark = pytest.mark.processes

SESSION = """
import sys
from zero_agent.launch.runners import Command
from zero_agent.launch.session import Session
command = Command(where="here", argv=("sh", "-c", "echo begun; sleep 600 & echo $!; echo ended"))
sys.exit(Session([command], lambda: None).run())
"""


def test_a_session_ends_with_its_commands_though_something_keeps_their_pipe_open() -> None:
    """As ssh does that keeps its connection for later: ControlPersist."""
    done = subprocess.run(
        [sys.executable, "-c", SESSION],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        timeout=100,
        check=False,
    )
    begun, kept, ended = done.stdout.split()
    os.kill(int(kept), signal.SIGKILL)  # it was still there
    assert (done.returncode, begun, ended) == (0, "begun", "ended")


TALKS = """
import sys
from zero_agent.launch.runners import Command
from zero_agent.launch.session import Session
talk = r"for n in 1 2 3; do printf '\\342\\226\\210\\377 %s\\n' $n || exit 9; sleep 0.1; done"
sys.exit(Session([Command(where="here", argv=("sh", "-c", talk))], lambda: None).run())
"""
TOLD = b"".join(b"\xe2\x96\x88\xff %d\n" % number for number in (1, 2, 3))


def talked(encoding: str, stdout: int | IO[bytes]) -> subprocess.CompletedProcess[bytes]:
    """A launch of one command, which prints a progress bar and a byte that is no text."""
    return subprocess.run(
        [sys.executable, "-c", TALKS],
        env={**environment(), "PYTHONIOENCODING": encoding},
        stdout=stdout,
        timeout=100,
        check=False,
    )


def test_what_workers_print_is_shown_as_it_is_whatever_the_locale():
    done = talked("latin-1", subprocess.PIPE)
    assert (done.returncode, done.stdout) == (0, TOLD)


def test_a_launch_goes_on_when_its_own_output_has_no_room():
    with open("/dev/full", "wb") as full:
        assert talked("utf-8", full).returncode == 0


UNREACHED = """
import sys
from zero_agent.launch.runners import Command
from zero_agent.launch.session import Session
sys.exit(Session([Command(where="w1", argv=("sh", "-c", "echo tried; exit 255"))], print).run())
"""


def test_a_launch_whose_only_connection_is_lost_ends_and_is_not_tried_without_end():
    done = subprocess.run(
        [sys.executable, "-c", UNREACHED],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stdout) == (255, "tried\n")


AWAY = """
import sys
from zero_agent.launch import session
from zero_agent.launch.runners import Command
session.RETRY_S = (0.1, 0.1)
ways = [Command(where=name, argv=("sh", "-c", sys.argv[1], name), stdin="-\\n") for name in "ab"]
sys.exit(session.Session(ways, lambda: None).run())
"""
COMES = """
echo 'zero-ctl launch: this host is ready for its variables'
read given
if mkdir $0 2> /dev/null; then exit 255; fi
touch $0/again
until [ -e a/again ] && [ -e b/again ]; do sleep 0.1; done
echo done
"""
COMES_NO_MORE = """
if mkdir $0 2> /dev/null; then
    echo 'zero-ctl launch: this host is ready for its variables'
    read given
else
    echo tried
fi
exit 255
"""


@pytest.mark.parametrize(
    ("host", "code", "word"), [(COMES, 0, "done"), (COMES_NO_MORE, 255, "tried")]
)
def test_hosts_that_are_all_lost_at_once_are_tried_again_for_a_while(tmp_path, host, code, word):
    """As when the network of the launcher is away for a moment, or for good."""
    done = subprocess.run(
        [sys.executable, "-c", AWAY, host],
        env=environment(),
        stdout=subprocess.PIPE,
        cwd=tmp_path,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, {*done.stdout.splitlines()}) == (code, {f"a: {word}", f"b: {word}"})
