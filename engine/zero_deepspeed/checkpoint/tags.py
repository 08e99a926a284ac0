"""A tag that `ds_to_universal` has made of another one."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["alias"]


def alias(load_dir: str | Path, tag: str | float | None) -> str | float | None:
    """The tag that another one stands for since `ds_to_universal`; otherwise the same."""
    link = Path(load_dir, str(tag))
    if tag is None or not link.is_symlink():
        return tag
    # A tag is a link to a checkpoint; an alias is a link to such a link.
    meant = Path(os.readlink(link))
    return meant.name if link.with_name(meant.name).is_symlink() else tag
