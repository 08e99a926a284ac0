"""The console scripts: Ctrl-C while they still import is an end without a traceback."""

from __future__ import annotations

import importlib
import signal
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

INTERRUPTED = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"
AS_MODULE = {
    "while it imports": INTERRUPTED,
    "while it works": f"def main():\n    {INTERRUPTED.replace(chr(10), '; ')}",
}


def run(directory: Path, program: str, before: str = "") -> subprocess.CompletedProcess[str]:
    (directory / "program.py").write_text(program)
    text = f"import sys; sys.path.insert(0, {str(directory)!r}); {before}"
    return subprocess.run(
        [sys.executable, "-c", f"{text}\nfrom zero_orchestrator.start import run; run('program')"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("when", "code"),
    [("while it imports", -signal.SIGINT), ("while it works", 128 + signal.SIGINT)],
)
def test_an_interrupt_ends_a_program_without_a_word(tmp_path, when, code):
    done = run(tmp_path, AS_MODULE[when])
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


def test_an_interrupt_that_is_ignored_stays_so(tmp_path):
    program = INTERRUPTED + "def main(): return 7\n"
    ignore = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"
    assert run(tmp_path, program, ignore).returncode == 7


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_half_a_character_is_shown_as_python_writes_it(tmp_path, monkeypatch, locale):
    """As an event may have it; the locale is that of containers."""
    monkeypatch.setenv("LC_ALL", locale)
    done = run(tmp_path, "def main(): print(chr(0xd800))")
    assert (done.returncode, done.stdout) == (0, "\\ud800\n")


def test_what_is_closed_leads_nowhere_and_is_no_file_that_is_opened_next(tmp_path):
    program = """
        import os, subprocess, sys
        def main():
            child = "import sys; sys.exit(None in (sys.stdin, sys.stdout, sys.stderr))"
            if subprocess.run([sys.executable, "-c", child]).returncode:
                return 1
            opened = os.open("opened", os.O_CREAT | os.O_WRONLY)
            print("to nobody")
            os.write(1, b"nor this")
            os.write(2, b"nor that")
            os.system("echo nor what a child says")
            return opened if sys.stdin.read() == "" else 1
    """
    (tmp_path / "program.py").write_text(textwrap.dedent(program))
    command = f"{sys.executable} -c 'from zero_orchestrator.start import run; run(\"program\")'"
    done = subprocess.run(
        ["bash", "-c", f"PYTHONPATH=.:{':'.join(sys.path)} {command} <&- >&- 2>&-"],
        cwd=tmp_path, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 3
    assert (tmp_path / "opened").read_bytes() == b""


@pytest.mark.parametrize("encoding", ["utf-8:strict", "latin-1"])
def test_a_character_that_the_terminal_cannot_show_ends_no_program(tmp_path, encoding, monkeypatch):
    """A worker has failed at a file whose name is not UTF-8: its job can be looked at."""
    monkeypatch.setenv("PYTHONIOENCODING", encoding)
    done = run(tmp_path, "def main(): print('data/\\udce4.bin')\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "data/\\udce4.bin\n", "")


def test_every_console_script_begins_here_and_brings_little_along():
    root = Path(__file__).resolve().parents[3]
    scripts = tomllib.loads((root / "pyproject.toml").read_text())["project"]["scripts"]
    assert {value.partition(":")[0] for value in scripts.values()} == {"zero_orchestrator.start"}
    text = (
        "import sys, zero_orchestrator.start; "
        "print({'torch', 'zero_agent', 'zero_engine', 'grpc'} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert found.stdout == "set()\n"


@pytest.mark.parametrize(
    "module",
    [
        "zero_agent.command.command_line",
        "zero_orchestrator.ctl.cli",
        "zero_checkpoint.tools.parser",
    ],
)
def test_every_program_says_its_version(module, capsys):
    parser = importlib.import_module(module).make_parser()
    with pytest.raises(SystemExit, match="0"):
        parser.parse_args(["--version"])
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert capsys.readouterr().out == f"zero-elastic {project['version']}\n"
