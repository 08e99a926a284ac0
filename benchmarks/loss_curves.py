"""Loss curves of one run at every stage and several worlds, and how far any two are apart.

    python benchmarks/loss_curves.py --out docs/loss-curves.svg

A small GPT learns real text (see `loss_curves_worker.py`) in fp32 and in bf16, at stages 0-3 on
1 to 4 ranks, and under torch's DistributedDataParallel on 1 and 2 ranks. The plot shows our
losses, and how far each fp32 run is from our own on one rank: those of ours that are equal to it
to the bit lie on zero. The program fails if one does not.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl

WORKER = Path(__file__).resolve().with_name("loss_curves_worker.py")
LIMIT_S = 1800
SPREAD = (1, 2, 3, 4)
"""Ranks of stage 0, 1, 2, 3."""


@dataclass(frozen=True, kw_only=True)
class Run:
    system: str
    world: int
    stage: int = 0
    bf16: bool = False

    @property
    def name(self) -> str:
        ranks = f"{self.world} rank{'s' if self.world > 1 else ''}"
        return f"torch DDP, {ranks}" if self.system == "ddp" else f"stage {self.stage}, {ranks}"


def runs() -> list[Run]:
    ours = [
        Run(system="zero", world=world, stage=stage, bf16=bf16)
        for bf16 in (False, True)
        for stage, world in enumerate(SPREAD)
    ]
    return [*ours, *(Run(system="ddp", world=world) for world in (1, 2))]


def losses_of(run: Run, steps: int) -> list[float]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={run.world}"]
    flags = [f"--system={run.system}", f"--stage={run.stage}", f"--steps={steps}"]
    done = subprocess.run(
        [sys.executable, *launcher, str(WORKER), *flags, *(["--bf16"] if run.bf16 else [])],
        stdout=subprocess.PIPE,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    losses: list[float] = json.loads(done.stdout)
    print(f"{run.name}{', bf16' if run.bf16 else ''}: last loss {losses[-1]:.6f}", flush=True)
    return losses


def check(curves: dict[Run, list[float]]) -> None:
    """Fail if two runs of ours in one precision differ anywhere."""
    for bf16 in (False, True):
        ours = {run: c for run, c in curves.items() if run.system == "zero" and run.bf16 is bf16}
        first = next(iter(ours.values()))
        apart = [run.name for run, losses in ours.items() if losses != first]
        if apart:
            raise SystemExit(f"not the same losses{', bf16' if bf16 else ''}: {', '.join(apart)}")


def look(run: Run) -> dict[str, Any]:
    """Thinner and darker from stage to stage, so that curves on top of each other are seen."""
    if run.system == "ddp":
        return {"color": ("tab:gray", "tab:orange")[run.world - 1], "linewidth": 1}
    shade = mpl.colormaps["Blues"](0.25 + 0.22 * run.stage)
    return {"color": shade, "linewidth": (9, 6.5, 4, 1.5)[run.stage]}


def draw(curves: dict[Run, list[float]], outs: Sequence[Path]) -> None:
    mpl.use("Agg")
    mpl.rcParams["svg.fonttype"] = "none"
    mpl.rcParams["svg.hashsalt"] = "zero"  # the same picture, the same file
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    for axis, bf16 in zip(axes, (False, True), strict=False):
        for run, losses in curves.items():
            if run.system == "zero" and run.bf16 is bf16:
                axis.plot(losses, label=run.name, **look(run))
        axis.set(title=f"loss, {'bf16' if bf16 else 'fp32'}", xlabel="step", ylim=(2, 6))
        axis.legend(fontsize=8)
    first, *others = (run for run in curves if not run.bf16)
    for run in others:
        pairs = zip(curves[run], curves[first], strict=True)
        axes[2].plot([abs(a - b) for a, b in pairs], label=run.name, **look(run))
    axes[2].set(title="distance from stage 0 on one rank, fp32", xlabel="step")
    axes[2].legend(fontsize=8, loc="upper right")
    axes[2].margins(y=0.3)
    for out in outs:
        figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, nargs="+", default=[Path("docs/loss-curves.svg")])
    args = parser.parse_args(arguments)
    curves = {run: losses_of(run, args.steps) for run in runs()}
    check(curves)
    draw(curves, args.out)
    print("wrote", *args.out)


if __name__ == "__main__":
    main()
