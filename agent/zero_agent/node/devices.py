"""Which accelerators this machine has, as its driver says, for whoever looks at the job."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

_MODEL = "Model:"


def devices(root: Path = Path("/")) -> str:
    """Such as `8 x NVIDIA H100 80GB HBM3`; empty without a GPU of NVIDIA's driver."""
    models: Counter[str] = Counter()
    for path in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:  # the GPU has just fallen off the bus
            continue
        models.update(
            line.removeprefix(_MODEL).strip() for line in lines if line.startswith(_MODEL)
        )
    return ", ".join(f"{count} x {model}" for model, count in models.items())
