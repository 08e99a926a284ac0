"""Shell completion of the programs: flags, commands, and the names of what runs.

`zero-ctl completion SHELL` prints what the shell must load. On a TAB the shell runs the program
itself, which answers and ends (argcomplete); `zero-ckpt` without torch (`zero_orchestrator.start`).
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from zero_contract.errors import ZeroError
from zero_orchestrator.observe import status
from zero_orchestrator.observe.status import JobStatus
from zero_orchestrator.store.kv import KeyValueStore

WAIT_S = 1.0  # a TAB takes no longer when etcd is away
_PROGRAMS = ("zero-ctl", "zero-agent", "zero-ckpt")
_LOADS = {
    "bash": 'eval "$(zero-ctl completion bash)" in ~/.bashrc',
    "zsh": 'eval "$(zero-ctl completion zsh)" in ~/.zshrc',
    "fish": "zero-ctl completion fish | source in ~/.config/fish/config.fish",
}


def add_to(commands: Any) -> None:
    """Add the command to the parser of `zero-ctl`."""
    text = (
        "print what a shell needs to complete the flags and names of zero-ctl, zero-agent and "
        "zero-ckpt"
    )
    parser = commands.add_parser(
        "completion",
        help=text,
        description=f"{text[0].upper()}{text[1:]}: {'; '.join(_LOADS.values())}.",
    )
    parser.add_argument("shell", choices=tuple(_LOADS), help="the shell")
    parser.set_defaults(act=_print)


def _print(args: argparse.Namespace) -> int:
    from argcomplete.shell_integration import shellcode

    print(shellcode(_PROGRAMS, shell=args.shell))
    return 0


def complete(
    parser: argparse.ArgumentParser, *, open_store: Callable[[argparse.Namespace, float], Any]
) -> NoReturn:
    """Answer the shell's question, which the environment holds, and end.

    Raises:
        SystemExit: Always.
    """
    import argcomplete

    def names(of: Callable[[JobStatus], Iterable[str]]) -> Callable[..., list[str]]:
        def there(parsed_args: argparse.Namespace, **_: object) -> list[str]:
            with contextlib.suppress(ZeroError):  # an error would be printed between the names
                store: KeyValueStore
                with contextlib.closing(open_store(parsed_args, WAIT_S)) as store:
                    return [name for job in status.read_all(store) for name in of(job)]
            return []

        return there

    completers = {"job": names(lambda job: [job.job]), "node": names(lambda job: job.live_nodes)}
    for action in _actions(parser):
        if action.dest in completers:
            action.completer = completers[action.dest]  # type: ignore[attr-defined]
    argcomplete.autocomplete(parser)
    raise SystemExit(0)


def _actions(parser: argparse.ArgumentParser) -> Iterable[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _actions(inner)
