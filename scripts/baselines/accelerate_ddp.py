"""The same training with Hugging Face Accelerate.

accelerate launch --cpu --num_processes 2 -m scripts.baselines.accelerate_ddp --data FOLDER
"""

from __future__ import annotations

import itertools
import time

from scripts.baselines import task

import torch  # isort: skip  # after the task, which notes the time
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader


def main() -> None:
    """What each worker does; `accelerate launch` starts them."""
    args = task.arguments()
    torch.set_num_threads(args.threads)
    accelerator = Accelerator(mixed_precision="no" if args.amp == "off" else args.amp)
    torch.manual_seed(0)
    train_set, test_set = task.datasets(args.data)
    model = task.MODELS[args.model]()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    model, optimizer, loader, test_loader = accelerator.prepare(
        model,
        optimizer,
        DataLoader(train_set, args.batch_size // args.workers, shuffle=True),
        DataLoader(test_set, 1000),
    )
    loss_fn = nn.CrossEntropyLoss()
    epoch_s, first_step_s = [], None
    for _ in range(args.epochs):
        began, running = time.time(), 0.0
        for images, labels in itertools.islice(loader, args.max_steps or None):
            optimizer.zero_grad()
            with accelerator.autocast():
                loss = loss_fn(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            running += loss.item()
            first_step_s = first_step_s or time.time() - task.STARTED
        epoch_s.append(time.time() - began)
    accuracy = None
    if args.evaluate:
        model.eval()
        right = []
        with torch.no_grad():
            for images, labels in test_loader:
                found, expected = accelerator.gather_for_metrics((model(images).argmax(1), labels))
                right.append((found == expected).float())
        accuracy = torch.cat(right).mean().item()
    args.workers = accelerator.num_processes
    if accelerator.is_main_process:
        task.report("accelerate", args, epoch_s, first_step_s, accuracy)
    accelerator.end_training()


if __name__ == "__main__":
    main()
