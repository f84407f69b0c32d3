"""The script that a person tunes by Optuna: torch's own loop and torchvision's data path; a line
for each epoch.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset

from scripts.baselines import task


def main() -> None:
    """Train, and print the accuracy on what is held out after each epoch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True, help="folder that holds FashionMNIST/raw")
    parser.add_argument("--model", choices=("mlp", "convnet"), required=True)
    for name in ("lr", "momentum", "weight-decay"):
        parser.add_argument(f"--{name}", type=float, required=True)
    for name in ("batch-size", "width", "epochs", "limit", "held-out"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = _mlp(args.width) if args.model == "mlp" else task.convnet()
    options = {"lr": args.lr, "momentum": args.momentum, "weight_decay": args.weight_decay}
    optimizer, loss_of = torch.optim.SGD(model.parameters(), **options), nn.CrossEntropyLoss()
    whole = task.datasets(args.data)[0]
    order = torch.randperm(60_000, generator=torch.Generator().manual_seed(0)).tolist()
    train = DataLoader(
        Subset(whole, order[args.held_out :][: args.limit]), args.batch_size, shuffle=True
    )
    val = DataLoader(Subset(whole, order[: args.held_out]), 1000)
    for _ in range(args.epochs):
        model.train()
        for images, labels in train:
            optimizer.zero_grad()
            loss_of(model(images), labels).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            correct = sum(int((model(images).argmax(1) == labels).sum()) for images, labels in val)
        print(correct / args.held_out, flush=True)


def _mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, width), nn.ReLU(), nn.Linear(width, 10))


if __name__ == "__main__":
    main()
