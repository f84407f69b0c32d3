"""The DDP script that a person writes by hand: mp.spawn, DistributedSampler, DataLoader,
loss.item() in each step.

python -m scripts.baselines.plain_ddp --data FOLDER --workers 2
"""

from __future__ import annotations

import argparse
import itertools
import os
import time

from scripts.baselines import task

import torch  # isort: skip  # after the task, which notes the time
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def train(rank: int, args: argparse.Namespace, started: float) -> None:
    """What each worker does."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29541")
    cuda = torch.cuda.is_available()
    torch.set_num_threads(args.threads)
    dist.init_process_group("nccl" if cuda else "gloo", rank=rank, world_size=args.workers)
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    model = DistributedDataParallel(
        task.MODELS[args.model]().to(device), device_ids=[rank] if cuda else None
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    loss_fn = nn.CrossEntropyLoss()
    train_set, test_set = task.datasets(args.data)
    sampler: DistributedSampler[object] = DistributedSampler(train_set, args.workers, rank)
    loader = DataLoader(train_set, args.batch_size // args.workers, sampler=sampler)
    dtype = task.AMP_DTYPE[args.amp]
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "fp16")
    epoch_s, first_step_s = [], None
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        began, running = time.time(), 0.0
        for images, labels in itertools.islice(loader, args.max_steps or None):
            images, labels = (
                images.to(device, non_blocking=True),
                labels.to(device, non_blocking=True),
            )
            optimizer.zero_grad()
            with torch.autocast(device.type, dtype, enabled=dtype is not None):
                loss = loss_fn(model(images), labels)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            running += loss.item()
            first_step_s = first_step_s or time.time() - started
        epoch_s.append(time.time() - began)
    if rank == 0:
        accuracy = None
        if args.evaluate:
            model.eval()
            with torch.no_grad():
                right = [
                    (model.module(images.to(device)).argmax(1).cpu() == labels).float()
                    for images, labels in DataLoader(test_set, 1000)
                ]
            accuracy = torch.cat(right).mean().item()
        task.report("plain", args, epoch_s, first_step_s, accuracy)
    dist.destroy_process_group()


if __name__ == "__main__":
    args = task.arguments()
    mp.spawn(train, (args, task.STARTED), args.workers)
