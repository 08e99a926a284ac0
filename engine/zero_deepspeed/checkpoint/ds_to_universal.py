"""DeepSpeed's `ds_to_universal`: no checkpoint needs a conversion, so it does nothing.

python -m zero_deepspeed.checkpoint.ds_to_universal --input_folder DIR --output_folder DIR
"""

from __future__ import annotations

import argparse
import sys

__all__ = ["main"]


def main(args: argparse.Namespace | None = None) -> int:
    """Say so; returns 0."""
    if args is None:
        parser = argparse.ArgumentParser(
            prog="python -m zero_deepspeed.checkpoint.ds_to_universal",
            description="Nothing to do: every checkpoint loads at every world size and stage.",
        )
        parser.add_argument("--input_folder", metavar="DIR", help="without effect")
        parser.add_argument("--output_folder", metavar="DIR", help="without effect")
        args, _ = parser.parse_known_args()
    print(
        "nothing to convert: every checkpoint of this engine loads at every world size and stage; "
        f"give {getattr(args, 'input_folder', None) or 'its directory'} to load_checkpoint(). For "
        "one of DeepSpeed: zero-ckpt import --from deepspeed"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
