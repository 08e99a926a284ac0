"""A language model fine-tuned as DeepSpeed's chat examples do it; only the imports are changed.

Its own loader and sampler, param groups, scheduler and evaluation; checkpoints with a client
state; a whole model at the end. The text is made up, the model is tiny.
"""

import argparse
import json
import math
import os

import torch
from torch.utils.data import DataLoader, Dataset, SequentialSampler
from torch.utils.data.distributed import DistributedSampler
from transformers import GPT2Config, GPT2LMHeadModel, get_scheduler

import zero_deepspeed as deepspeed
from zero_deepspeed import comm as dist
from zero_deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from zero_deepspeed.runtime.utils import see_memory_usage
from zero_deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from zero_deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--per_device_train_batch_size", type=int, default=2)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--num_train_epochs", type=int, default=2)
    parser.add_argument("--total_epochs", type=int, default=2, help="of the schedule")
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--weight_decay", type=float, default=0.1)
    parser.add_argument("--zero_stage", type=int, default=0)
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--local_rank", type=int, default=-1)
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


def get_train_ds_config(args):
    device = "cpu" if args.offload else "none"
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": args.per_device_train_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "steps_per_print": 10,
        "zero_optimization": {
            "stage": args.zero_stage,
            "overlap_comm": True,
            "offload_param": {"device": "none"},
            "offload_optimizer": {"device": device},
            "stage3_param_persistence_threshold": 1e4,
            "stage3_max_live_parameters": 3e7,
            "stage3_prefetch_bucket_size": 3e7,
            "memory_efficient_linear": False,
        },
        "bfloat16": {"enabled": True},
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
        "hybrid_engine": {"enabled": False, "max_out_tokens": 512, "inference_tp_size": 1},
        "tensorboard": {"enabled": False, "output_path": "ds_tensorboard/", "job_name": "step1"},
    }


class Counting(Dataset):
    """Rows of numbers that go up by a step."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        row = (index * 7 + torch.arange(16) * (1 + index % 3)) % 61
        return {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row}


def grouped_parameters(model, weight_decay, no_decay=("bias", "ln_1.weight", "ln_2.weight")):
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    with_decay = [p for n, p in named if not any(part in n for part in no_decay)]
    without = [p for n, p in named if any(part in n for part in no_decay)]
    return [
        {"params": with_decay, "weight_decay": weight_decay},
        {"params": without, "weight_decay": 0.0},
    ]


def evaluation(model, eval_dataloader, device):
    model.eval()
    losses = 0
    for step, batch in enumerate(eval_dataloader):
        batch = {k: v.to(device) for k, v in batch.items()}
        with torch.no_grad():
            outputs = model(**batch)
        losses += outputs.loss.float()
    losses = losses / (step + 1)
    dist.all_reduce(losses)
    losses = losses / dist.get_world_size()
    try:
        return math.exp(losses.item())
    except OverflowError:
        return float("inf")


def save_zero_three_model(model_ema, global_rank, save_dir, zero_stage=0):
    os.makedirs(save_dir, exist_ok=True)
    path = os.path.join(save_dir, "pytorch_model.bin")
    model_to_save = model_ema.module if hasattr(model_ema, "module") else model_ema
    output_state_dict = {}
    for k, v in model_to_save.named_parameters():
        if hasattr(v, "ds_id") and v.ds_status == ZeroParamStatus.NOT_AVAILABLE:
            with deepspeed.zero.GatheredParameters([v], enabled=zero_stage == 3):
                v_p = v.data.cpu().clone()
        else:
            v_p = v.cpu()
        if global_rank == 0 and "lora" not in k:
            output_state_dict[k] = v_p
    if global_rank == 0:
        torch.save(output_state_dict, path)


def make_model(args):
    shape = GPT2Config(
        vocab_size=61,
        n_positions=16,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLM",
    )
    with deepspeed.zero.Init(config_dict_or_path=get_train_ds_config(args), enabled=False):
        return GPT2LMHeadModel(shape)


def make_loader(args, dataset, sampler):
    return DataLoader(dataset, sampler=sampler, batch_size=args.per_device_train_batch_size)


def make_engine(args, batches):
    model = make_model(args)
    AdamOptimizer = DeepSpeedCPUAdam if args.offload else FusedAdam
    optimizer = AdamOptimizer(
        grouped_parameters(model, args.weight_decay), lr=args.learning_rate, betas=(0.9, 0.95)
    )
    updates = math.ceil(batches / args.gradient_accumulation_steps)
    lr_scheduler = get_scheduler(
        name="cosine",
        optimizer=optimizer,
        num_warmup_steps=2,
        num_training_steps=args.total_epochs * updates,
    )
    model, optimizer, _, lr_scheduler = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        args=args,
        config=get_train_ds_config(args),
        lr_scheduler=lr_scheduler,
        dist_init_required=True,
    )
    model.activation_checkpointing_enable()
    return model, lr_scheduler


def train_epoch(model, train_dataloader, device):
    model.train()
    for batch in train_dataloader:
        batch = {k: v.to(device) for k, v in batch.items()}
        outputs = model(**batch, use_cache=False)
        loss = outputs.loss
        model.backward(loss)
        model.step()


def report(args, model):
    digest = model.weight_hash()
    if args.global_rank == 0:
        whole = get_fp32_state_dict_from_zero_checkpoint(args.output_dir)
        total = sum(value.double().sum().item() for value in whole.values())
        print(json.dumps({"weights": digest, "steps": model.global_steps, "sum": total}))


def main():
    args = parse_args()
    deepspeed.init_distributed()
    args.global_rank = torch.distributed.get_rank()
    device = torch.device(deepspeed.get_accelerator().device_name(max(args.local_rank, 0)))
    torch.manual_seed(1234)
    torch.distributed.barrier()

    train_dataset, eval_dataset = Counting(24), Counting(8)
    train_dataloader = make_loader(args, train_dataset, DistributedSampler(train_dataset))
    eval_dataloader = make_loader(args, eval_dataset, SequentialSampler(eval_dataset))
    model, lr_scheduler = make_engine(args, len(train_dataloader))

    _, client_sd = model.load_checkpoint(args.output_dir)
    for epoch in range((client_sd or {}).get("epoch", 0), args.num_train_epochs):
        train_dataloader.sampler.set_epoch(epoch)
        train_epoch(model, train_dataloader, device)
        perplexity = evaluation(model, eval_dataloader, device)
        see_memory_usage(f"epoch {epoch}", force=True)
        if args.global_rank == 0:
            print(f"epoch {epoch}: perplexity {perplexity:.4f}, lr {lr_scheduler.get_last_lr()}")
        model.save_checkpoint(args.output_dir, client_sd={"epoch": epoch + 1})

    save_zero_three_model(model, args.global_rank, args.output_dir, zero_stage=args.zero_stage)
    model.save_16bit_model(args.output_dir, "half.bin")
    report(args, model)


if __name__ == "__main__":
    main()
