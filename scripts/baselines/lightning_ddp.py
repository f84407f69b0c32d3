"""The same training with Lightning: its DDP strategy, torchmetrics and a TensorBoard logger, as its
templates have it.

python -m scripts.baselines.lightning_ddp --data FOLDER --workers 2
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Any

from scripts.baselines import task

import torch  # isort: skip  # after the task, which notes the time
import lightning
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

PRECISION = {"off": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


class Classifier(lightning.LightningModule):  # type: ignore[misc]
    """A model, its loss and its metrics."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.args, self.net, self.loss = args, task.MODELS[args.model](), nn.CrossEntropyLoss()
        self.train_accuracy, self.test_accuracy = MulticlassAccuracy(10), MulticlassAccuracy(10)
        self.epoch_s: list[float] = []
        self.first_step_s: float | None = None
        self.began = 0.0

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """The loss of a batch."""
        images, labels = batch
        logits = self.net(images)
        loss: Tensor = self.loss(logits, labels)
        self.train_accuracy(logits, labels)
        self.log("train/loss", loss, on_epoch=True)
        self.log("train/accuracy", self.train_accuracy, on_epoch=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        """Note when the first step was done."""
        self.first_step_s = self.first_step_s or time.time() - task.STARTED

    def on_train_epoch_start(self) -> None:
        """Note when the epoch began."""
        self.began = time.time()

    def on_train_epoch_end(self) -> None:
        """Note how long the epoch took."""
        self.epoch_s.append(time.time() - self.began)

    def test_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        """Count what is right."""
        images, labels = batch
        self.test_accuracy(self.net(images), labels)
        self.log("test/accuracy", self.test_accuracy, on_epoch=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=self.args.lr)


def main() -> None:
    """The first worker; Lightning starts the others with the same command."""
    args = task.arguments()
    torch.set_num_threads(args.threads)
    train_set, test_set = task.datasets(args.data)
    classifier = Classifier(args)
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_epochs=args.epochs,
            accelerator="auto",
            devices=args.workers,
            strategy="ddp",
            precision=PRECISION[args.amp],
            logger=TensorBoardLogger(folder),
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
            limit_train_batches=args.max_steps or None,
        )
        trainer.fit(
            classifier, DataLoader(train_set, args.batch_size // args.workers, shuffle=True)
        )
        accuracy = None
        if args.evaluate:
            accuracy = trainer.test(classifier, DataLoader(test_set, 1000), verbose=False)[0][
                "test/accuracy"
            ]
        args.workers = trainer.world_size
        if trainer.is_global_zero:
            task.report("lightning", args, classifier.epoch_s, classifier.first_step_s, accuracy)


if __name__ == "__main__":
    main()
