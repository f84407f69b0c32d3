"""Distillation (Hinton, Vinyals and Dean 2015): a student learns a teacher's probabilities."""

from torch import nn
from torch.nn import functional

import expt


class Student(nn.Sequential):
    """A hidden layer."""

    def __init__(self, channels, image_size, num_classes, width):
        pixels = channels * image_size[0] * image_size[1]
        layers = nn.Linear(pixels, width), nn.ReLU(), nn.Linear(width, num_classes)
        super().__init__(nn.Flatten(), *layers)


class Distilled(expt.Task):
    """Cross-entropy; in training a share of it is the divergence from the teacher's outputs."""

    def __init__(self, teacher, temperature, share):
        self.teacher, self.temperature, self.share = teacher, temperature, share

    def loss(self, outputs, batch):
        return functional.cross_entropy(outputs, batch.targets, reduction="sum"), len(outputs)

    def training_loss(self, outputs, batch):
        pairs = outputs, self.teacher(batch.inputs)
        student, teacher = ((each / self.temperature).log_softmax(1) for each in pairs)
        soft = functional.kl_div(student, teacher, log_target=True, reduction="sum")
        hard, number = self.loss(outputs, batch)
        return self.share * self.temperature**2 * soft + (1 - self.share) * hard, number

    def measure(self, outputs, batch):
        return {"accuracy": ((outputs.argmax(1) == batch.targets).sum(), len(outputs))}
