"""The command line of `zero-ckpt`: its commands and flags; `cli` has the function of each command.

Nothing here imports torch, directly or not, so that a shell can ask for the flags (`main`) without
waiting for it.
"""

from __future__ import annotations

import argparse
import sys

from zero_checkpoint.tools import arguments
from zero_contract.version import add_version

DTYPES = ("float32", "float16", "bfloat16", "float64")
FORMATS = ("torch", "hf", "dcp", "deepspeed")
"""Sources of `import`."""
_DTYPE = (
    "dtype of the trained parameters (default float32, in which the engine trains whatever it "
    "computes in; keep: as stored)"
)
_COMPUTE_DTYPE = (
    "dtype of buffers and frozen parameters (default: the dtype that SOURCE computed in, else as "
    "stored)"
)


def main() -> None:
    """Answer the question of a shell for what may follow; the environment holds it."""
    import argcomplete

    argcomplete.autocomplete(make_parser())
    sys.exit(0)


def make_parser() -> argparse.ArgumentParser:
    """The command line of `zero-ckpt`."""
    parser = argparse.ArgumentParser(
        prog="zero-ckpt",
        description="Look into checkpoints; check, compare, convert and prune them.",
        epilog="DIR is a directory of checkpoints, which stands for the newest of them, or one "
        "checkpoint in it, or DIR@TAG. Exit codes: 0 done, 1 damage or differences found, 2 not "
        "done.",
    )
    add_version(parser)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text)
        made.set_defaults(command=name)
        made.add_argument(
            "--json", action="store_true", help="print one JSON document instead of text"
        )
        return made

    ls = command("ls", "List the checkpoints of a directory, newest first.")
    ls.add_argument("dir", metavar="DIR", help="directory of checkpoints")
    ls.add_argument("--verify", action="store_true", help="read every block of all checkpoints")
    show = command("show", "Show what is in a checkpoint.")
    show.add_argument("checkpoint", metavar="DIR[@TAG]", help=arguments.CHECKPOINT)
    show.add_argument(
        "--norms", action="store_true", help="read all tensors and show their L2 norms"
    )
    verify = command("verify", "Read every block and name all damage.")
    verify.add_argument("checkpoint", metavar="DIR[@TAG]", help=arguments.CHECKPOINT)
    verify.add_argument(
        "--all", action="store_true", help="verify all checkpoints of the directory"
    )
    verify.add_argument(
        "--threads",
        type=arguments.positive,
        help="number of threads that read (default: one for each CPU, at most 8)",
    )
    diff = command("diff", "Compare two checkpoints tensor by tensor.")
    diff.add_argument("left", metavar="A[@TAG]", help="checkpoint to compare")
    diff.add_argument("right", metavar="B[@TAG]", help="checkpoint to compare it with")
    _add_export(command("export", "Write the model of a checkpoint for other libraries."))
    _add_import(command("import", "Make a checkpoint from one of another library."))
    prune = command("prune", "Delete old checkpoints, except those that the flags keep.")
    prune.add_argument("dir", metavar="DIR", help="directory of checkpoints")
    prune.add_argument(
        "--keep-last",
        type=arguments.positive,
        required=True,
        metavar="N",
        help="keep the N newest checkpoints, at least 2",
    )
    prune.add_argument(
        "--keep-every",
        type=arguments.positive,
        metavar="M",
        help="keep the checkpoints whose step is a multiple of M as well",
    )
    prune.add_argument(
        "--keep-best",
        type=arguments.best,
        metavar="METRIC:min[:N]",
        help="keep the N checkpoints with the smallest METRIC of the client_state as well "
        "(default of N: 1); METRIC:max[:N] keeps those with the largest",
    )
    prune.add_argument(
        "--dry-run", action="store_true", help="print what would be deleted, and delete nothing"
    )
    repair = command(
        "repair",
        "Delete what interrupted saves left, and rebuild the hint to the newest checkpoint.",
    )
    repair.add_argument("dir", metavar="DIR", help="directory of checkpoints")
    repair.add_argument(
        "--older-than",
        type=arguments.duration_s,
        default="1h",
        metavar="AGE",
        help="delete unfinished saves that nothing was written to for this long: 90s, 30m, 1h, 2d "
        "(default 1h)",
    )
    repair.add_argument(
        "--dry-run", action="store_true", help="print what would be done, and do nothing"
    )
    return parser


def _add_export(parser: argparse.ArgumentParser) -> None:
    """The flags of `export`."""
    parser.add_argument("checkpoint", metavar="DIR[@TAG]", help=arguments.CHECKPOINT)
    parser.add_argument(
        "out",
        type=arguments.local_path,
        metavar="OUT",
        help="file to make; with --to hf and --to dcp the directory to make",
    )
    parser.add_argument(
        "--to",
        required=True,
        choices=("torch", "hf", "dcp"),
        help="torch: a file for torch.load; hf: a directory for from_pretrained; dcp: one for "
        "torch.distributed.checkpoint, with the optimizer",
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, help="dtype of floats in OUT (default: as stored)"
    )
    parser.add_argument(
        "--strip-prefix", default="", metavar="P", help="remove the prefix P from all names"
    )
    parser.add_argument(
        "--hf-config",
        type=arguments.local_path,
        metavar="DIR",
        help="with --to hf: directory to copy config.json and tokenizer from (default: the one "
        "beside the checkpoint, which the Trainer writes)",
    )
    parser.add_argument(
        "--max-shard-size",
        type=arguments.size,
        metavar="SIZE",
        help="with --to hf: largest size of a file (default 5GB)",
    )


def _add_import(parser: argparse.ArgumentParser) -> None:
    """The flags of `import`."""
    parser.add_argument(
        "source", type=arguments.local_path, metavar="SOURCE", help="file or directory to read"
    )
    parser.add_argument("dir", metavar="DIR", help="directory of checkpoints to write into")
    parser.add_argument(
        "--from", dest="kind", required=True, choices=FORMATS, help="format of SOURCE"
    )
    parser.add_argument(
        "--tag", default="imported", help="name of the new checkpoint (default imported)"
    )
    parser.add_argument(
        "--step",
        type=arguments.not_negative,
        help="step of the new checkpoint (default: the step that SOURCE names, else 0)",
    )
    parser.add_argument("--dtype", choices=(*DTYPES, "keep"), default="float32", help=_DTYPE)
    parser.add_argument("--compute-dtype", choices=DTYPES, help=_COMPUTE_DTYPE)
    parser.add_argument(
        "--allow-pickle",
        action="store_true",
        help="allow SOURCE to run code while it is read; only for files that you trust",
    )
    parser.add_argument(
        "--buffer",
        action="append",
        default=[],
        metavar="GLOB",
        help="names of tensors that are buffers, not parameters; may be repeated",
    )
    parser.add_argument(
        "--frozen",
        action="append",
        default=[],
        metavar="GLOB",
        help="names of parameters that are not trained; may be repeated",
    )
    parser.add_argument(
        "--tie",
        action="append",
        default=[],
        type=arguments.pair,
        metavar="OTHER=NAME",
        help="OTHER is a second name of the tied parameter NAME; may be repeated",
    )
    parser.add_argument(
        "--key", default="", help="with --from torch: key of the model in the file, such as model"
    )
    parser.add_argument(
        "--model-key",
        help="with --from dcp: key of the model, such as app.model (default: found by its shape)",
    )
    parser.add_argument(
        "--optimizer-key",
        help="with --from dcp: key of the optimizer (default: found by its shape)",
    )
