"""Stories of failures as text files: what happens, and the log that all agents write of it.

`python -m tests.simulation.scenarios --rewrite` writes the logs anew, after a change of what agents
say or do; the difference is to be read like any other change. Each file of `scenarios/` begins
with its title, the job, and what happens; the log follows below the line of dashes.

Source of the idea: the data-driven tests of etcd's raft.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.simulation.cluster import Line, Setting
from tests.simulation.faults import HEAL, Fault
from tests.simulation.simulation import Plan, run

DIRECTORY = Path(__file__).with_name("scenarios")
LINE = "-" * 20
LEFT_OUT = ("this node's time", "the time of all nodes", "others see to it")
SEED = 1


@dataclass(frozen=True)
class Scenario:
    """One file."""

    title: str
    setting: str
    faults: tuple[str, ...]
    log: str

    @classmethod
    def of(cls, text: str) -> Scenario:
        """A file's content."""
        story, _, log = text.partition(f"{LINE}\n")
        title, setting, *faults = story.splitlines()
        return cls(title.removeprefix("# "), setting, tuple(faults), log)

    def __str__(self) -> str:
        story = "\n".join((f"# {self.title}", self.setting, *self.faults))
        return f"{story}\n{LINE}\n{self.log}"

    def play(self) -> tuple[str, list[str]]:
        """The log, and the invariants that are broken."""
        setting = setting_of(self.setting)
        starts = [Fault(0.0, "start", name) for name in "abcdefgh"[: setting.nodes]]
        given = sorted(Fault.of(text) for text in self.faults)
        late = {fault.node for fault in given if fault.kind == "start"}
        faults = [one for one in starts if one.node not in late] + given
        over_s = max(fault.at_s + fault.for_s for fault in faults)
        result = run(Plan(SEED, setting, (*faults, Fault(over_s + 1.0, HEAL))))
        shown = [_shown(line) for line in result.history if not _is_left_out(line)]
        return "".join(f"{line}\n" for line in shown), result.problems


def setting_of(text: str) -> Setting:
    """`nodes=2 steps=5` as a `Setting`."""
    given = dict(word.split("=") for word in text.split())
    return Setting(**{name: type(getattr(Setting, name))(value) for name, value in given.items()})


def _shown(line: Line) -> str:
    return f"{line.at_s:6.1f}  {line.who:<5} {line.what}".rstrip()


def _is_left_out(line: Line) -> bool:
    return any(words in line.what for words in LEFT_OUT) or line.what == HEAL


def scenarios() -> list[Path]:
    """All files."""
    return sorted(DIRECTORY.glob("*.txt"))


def main() -> int:
    """Play all scenarios; the exit code is 1 if a log differs, or an invariant is broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.scenarios")
    parser.add_argument("--rewrite", action="store_true", help="write the logs anew")
    args, failed = parser.parse_args(), False
    for path in scenarios():
        scenario = Scenario.of(path.read_text())
        log, problems = scenario.play()
        outcome = problems[0] if problems else "as written" if log == scenario.log else "differs"
        print(f"{path.stem}: {outcome}")
        failed |= bool(problems) or (outcome == "differs" and not args.rewrite)
        if args.rewrite:
            path.write_text(str(Scenario(scenario.title, scenario.setting, scenario.faults, log)))
    return failed


if __name__ == "__main__":
    sys.exit(main())
