"""DeepSpeed's `ds_to_universal`: no checkpoint needs a conversion, so it makes a link.

python -m zero_deepspeed.checkpoint.ds_to_universal --input_folder DIR/TAG --output_folder DIR/NEW
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

__all__ = ["main"]


def main(args: argparse.Namespace | None = None) -> int:
    """Say so, and make the new tag an alias of the old one; returns 0."""
    if args is None:
        parser = argparse.ArgumentParser(
            prog="python -m zero_deepspeed.checkpoint.ds_to_universal",
            description="Nothing to do: every checkpoint loads at every world size and stage.",
        )
        parser.add_argument("--input_folder", metavar="DIR", help="the checkpoint: DIR/TAG")
        parser.add_argument("--output_folder", metavar="DIR", help="another tag for it: DIR/NEW")
        args, _ = parser.parse_known_args()
    folder, link = (getattr(args, each, None) for each in ("input_folder", "output_folder"))
    if folder and link:
        old, new = Path(folder), Path(link)
        # The link is relative, so it stays right where the directory is moved.
        beside = old.parent.resolve() == new.parent.resolve()
        if beside and old.is_symlink() and not new.exists():
            new.symlink_to(old.name)
    print(
        "nothing to convert: every checkpoint of this engine loads at every world size and stage; "
        f"give {folder or 'its directory'} to load_checkpoint(). For one of DeepSpeed: zero-ckpt "
        "import --from deepspeed"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
