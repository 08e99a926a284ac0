"""What a user of Kubeflow's SDK types, but for the file of the cluster: train.py KUBECONFIG."""

import sys

from kubeflow.common.types import KubernetesBackendConfig
from kubeflow.trainer import CustomTrainer, TrainerClient


def train(steps):
    import time
    from pathlib import Path

    import torch
    from torch.utils.data import DataLoader, TensorDataset

    import zero_torch
    from zero_comm.worker.distributed import init_distributed

    init_distributed()
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps)
    data = TensorDataset(torch.arange(16.0 * steps).reshape(-1, 4) / steps)
    loader = DataLoader(data, batch_size=1)
    run = zero_torch.protect(model, optimizer, loader, microbatches=4, scheduler=schedule)
    run.load("/checkpoints/linear")
    for (batch,) in run.loader:
        run.backward(model(batch).mean())
        if run.step():
            print("step", run.global_step, "of", steps, flush=True)
        if Path("/checkpoints/slow").exists():
            time.sleep(0.2)
    run.save("/checkpoints/linear")
    print("weights", model.module.weight.tolist())


client = TrainerClient(KubernetesBackendConfig(config_file=sys.argv[1], namespace="default"))
print([runtime.name for runtime in client.list_runtimes()])
trainer = CustomTrainer(
    func=train,
    func_args={"steps": 120},
    num_nodes=1,
    resources_per_node={"cpu": 1, "memory": "4Gi"},
)
print(client.train(runtime="zero-elastic", trainer=trainer))
