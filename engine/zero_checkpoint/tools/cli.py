"""`zero-ckpt`: the commands and their exit codes; `parser` has their flags.

Must always hold: a user never sees a traceback; nothing is changed by a command that only looks,
nor with `--dry-run`.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.files.place import Place, place
from zero_checkpoint.loading.candidates import WAS_COMMITTED, Candidate, Why, find
from zero_checkpoint.tools import locate, output, upkeep
from zero_checkpoint.tools.compare import Relation, compare
from zero_checkpoint.tools.conversion import convert
from zero_checkpoint.tools.describe import describe
from zero_checkpoint.tools.listing import ListedStatus, list_roots
from zero_checkpoint.tools.parser import make_parser
from zero_checkpoint.tools.records import Compared, Deed, Failed, Tidied, Verified
from zero_checkpoint.tools.verify import Damage, of_manifest, total_bytes, verify
from zero_contract.exit_codes import CkptExit

INTERRUPTED, TERMINATED = 130, 143
"""Exit codes after Ctrl-C, after SIGTERM."""
_BROKEN_PIPE = 141
_log = logging.getLogger(__name__)


class _Terminated(KeyboardInterrupt):
    """SIGTERM: it ends a command as Ctrl-C does, cleaning up on the way."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    logging.basicConfig(format="zero-ckpt: %(message)s", level=logging.WARNING)
    options = make_parser().parse_args(arguments)

    def terminate(*_: object) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        return _run(options)
    except _Terminated:
        return _fail(options, "terminated", TERMINATED)
    except KeyboardInterrupt:
        return _fail(options, "interrupted", INTERRUPTED)
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(options: argparse.Namespace) -> int:
    """The command's exit code. Nothing but KeyboardInterrupt is raised."""
    try:
        code = _COMMANDS[options.command](options)
        # Here a broken pipe and a full disk can still become an exit code.
        sys.stdout.flush()
        return code or CkptExit.OK
    except CheckpointError as error:
        return _fail(options, str(error))
    except BrokenPipeError:  # `zero-ckpt show ... | head`
        _give_up_stdout()
        return _BROKEN_PIPE
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _fail(options, f"{where}{error.strerror or error}")


def _fail(options: argparse.Namespace, message: str, code: int = CkptExit.TROUBLE) -> int:
    """Print a message to stderr, for people, and with --json to stdout as well, for tools."""
    print(f"zero-ckpt: {message}", file=sys.stderr)
    try:
        if options.json:
            output.print_json(Failed(error=message, exit_code=code))
        sys.stdout.flush()
    except OSError:  # perhaps the very full disk that the message is about
        _give_up_stdout()
    return code


def _give_up_stdout() -> None:
    """Point stdout at /dev/null."""
    # The interpreter flushes it again when the process ends, and would report the same error.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# ---- looking ----


def _ls(options: argparse.Namespace) -> int:
    roots = locate.all_roots(options.dir)
    check = _checker(options) if options.verify else None
    rows = list_roots(place(options.dir), roots, now_s=time.time(), check=check)
    (output.print_json if options.json else output.show_rows)(rows)
    damaged = any(row.status is ListedStatus.DAMAGED for row in rows)
    return CkptExit.FOUND if damaged else CkptExit.OK


def _show(options: argparse.Namespace) -> int:
    checkpoint = locate.one(options.checkpoint)
    with output.progress(checkpoint, quiet=options.json) as progress:
        record = describe(checkpoint, norms=options.norms, progress=progress)
    (output.print_json if options.json else output.show_description)(record)
    return CkptExit.OK


def _verify(options: argparse.Namespace) -> int:
    chosen: Sequence[Candidate]
    if options.all:
        found = [find(root) for root in locate.all_roots(options.checkpoint)]
        chosen = [each for one in found for each in one.candidates]
        # A checkpoint that was committed and whose manifest cannot be used is damage as well.
        unusable = [each for one in found for each in one.rejected if each.why in WAS_COMMITTED]
        if not chosen and not unusable:
            raise CheckpointError(f"{options.checkpoint}: there is no committed checkpoint here")
    else:
        newest, unusable = locate.newest(options.checkpoint)
        chosen = [newest]
    check = _checker(options)
    results: list[Verified] = []

    def report(path: Place, size: int, damages: list[Damage]) -> None:
        results.append(Verified(path=str(path), size_bytes=size, damage=damages))
        if not options.json:
            output.show_damage(path, damages, size)

    for entry in unusable:
        if entry.why is Why.DAMAGED:
            damage = of_manifest(entry)
            report(entry.path, damage.end, [damage])
        else:
            _log.warning("passed over: %s", entry.reason)
    for checkpoint in chosen:
        report(checkpoint.path, total_bytes(checkpoint.manifest), check(checkpoint))
    if options.json:
        output.print_json(results)
    return CkptExit.FOUND if any(result.damage for result in results) else CkptExit.OK


def _checker(options: argparse.Namespace) -> Callable[[Candidate], list[Damage]]:
    # The flag of `verify` alone; `ls` and `prune` check as well.
    threads = getattr(options, "threads", None)

    def check(checkpoint: Candidate) -> list[Damage]:
        with output.progress(checkpoint, quiet=options.json) as progress:
            return verify(checkpoint, threads=threads, progress=progress)

    return check


def _diff(options: argparse.Namespace) -> int:
    left, right = locate.one(options.left), locate.one(options.right)
    with output.progress(left, quiet=options.json) as progress:
        found = list(compare(left, right, progress=progress))
    if options.json:
        counts = output.counts(found)
        record = Compared(left=str(left.path), right=str(right.path), counts=counts, tensors=found)
        output.print_json(record)
    else:
        output.show_differences(found)
    return CkptExit.OK if all(item.relation is Relation.EQUAL for item in found) else CkptExit.FOUND


# ---- tidying ----


def _prune(options: argparse.Namespace) -> int:
    plan = upkeep.plan_prune(
        locate.root(options.dir),
        keep_last=options.keep_last,
        keep_every=options.keep_every,
        keep_best=options.keep_best,
        check=_checker(options),
    )
    return _carry_out(options, plan)


def _repair(options: argparse.Namespace) -> int:
    root = locate.root(options.dir)
    plan = upkeep.plan_repair(root, now_s=time.time(), older_than_s=options.older_than)
    return _carry_out(options, plan)


def _carry_out(options: argparse.Namespace, plan: upkeep.UpkeepPlan) -> int:
    announced = plan.actions if options.json else output.show_plan(plan, dry_run=options.dry_run)
    for action in announced:  # a failure leaves the actions before it done, and announced
        if not options.dry_run:
            action.act()
    if options.json:
        actions = [Deed(what=a.what, path=str(a.path), reason=a.reason) for a in plan.actions]
        output.print_json(Tidied(done=not options.dry_run, actions=actions, notes=plan.notes))
    return CkptExit.OK


_COMMANDS: Mapping[str, Callable[[argparse.Namespace], int | None]] = {
    "ls": _ls,
    "show": _show,
    "verify": _verify,
    "diff": _diff,
    "export": convert.run_export,
    "import": convert.run_import,
    "prune": _prune,
    "repair": _repair,
}


if __name__ == "__main__":
    sys.exit(main())
