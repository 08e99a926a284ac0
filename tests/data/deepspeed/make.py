"""Makes the checkpoints beside it with DeepSpeed itself, as two ranks on CPUs.

    pip install deepspeed==0.19.8
    for stage in 1 2 3; do DS_ACCELERATOR=cpu torchrun --nproc-per-node=2 make.py $stage; done

`truth.safetensors` of each is what DeepSpeed's own converter to universal checkpoints finds in
it. Only the tests of the import use these files; they do not need DeepSpeed.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

HERE = Path(__file__).parent
KINDS = {"fp32": "param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


class Net(nn.Module):
    """Odd sizes, a tied and a frozen parameter, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.norm = nn.LayerNorm(5)
        self.frozen = nn.Parameter(torch.rand(5), requires_grad=False)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("offset", torch.rand(3))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.embed(tokens)) * self.frozen
        return self.head(hidden).float().logsumexp(-1).mean() + self.offset.float().sum()


def main(stage: int) -> None:
    deepspeed.init_distributed("gloo")
    torch.manual_seed(stage)
    model = Net()
    groups = [
        {"params": [model.embed.weight], "weight_decay": 0.1},
        {"params": [model.norm.weight, model.norm.bias], "lr": 5e-3, "weight_decay": 0.0},
    ]
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(groups, lr=1e-2),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 1,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": stage != 2},
        },
    )
    for step in range(3):
        tokens = torch.arange(4).view(2, 2) + dist.get_rank() + step
        engine.backward(engine(tokens % 7))
        engine.step()
    out = HERE / f"stage{stage}"
    universal = {"universal_checkpoint_version": 0.2}
    engine.save_checkpoint(out, tag="t", client_state={"universal_checkpoint_info": universal})
    dist.barrier()
    if dist.get_rank() == 0:
        _write_truth(out)


def _write_truth(out: Path) -> None:
    converter = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    folders = ["--input_folder", str(out / "t"), "--output_folder", str(out / "universal")]
    subprocess.run([*converter, *folders], check=True)
    truth = {}
    for path in sorted((out / "universal" / "zero").glob("*/*.pt")):
        if path.stem in KINDS:
            data = torch.load(path, weights_only=True)
            data = data["param"] if isinstance(data, dict) else data
            truth[f"{KINDS[path.stem]}/{path.parent.name}"] = data.float().contiguous().clone()
    save_file(truth, out / "truth.safetensors")


if __name__ == "__main__":
    main(int(sys.argv[1]))
