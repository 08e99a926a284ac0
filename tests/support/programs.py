"""Programs that a test needs and that this machine may lack, or have without being able to run."""

from __future__ import annotations

import functools
import shutil
import subprocess

_ANSWERS = {
    "kubectl": ("kubectl", "version", "--client"),
    "kustomize": ("kustomize", "version"),
}
"""Program -> a command that ends well where it works: on some login nodes it only says no."""


@functools.cache
def works(program: str) -> bool:
    """Whether a program is on the PATH and answers."""
    if shutil.which(program) is None:
        return False
    try:
        subprocess.run(_ANSWERS[program], capture_output=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return False
    return True
