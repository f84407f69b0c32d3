"""A task whose step is several updates, one after another, as a GAN's."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from expt.data.loading import Batch
from expt.tasks.task import Sum, Task


class PhasedTask(Task):
    """A task whose step goes through `phases`: each has a loss over parameters of its own, and is
    an update.

    A GAN in 2 lines of YAML and 13 of Python; its dataset gives {"image": ..., "noise":
    torch.randn(32)}, alike on any number of workers, for what a sample draws hangs on the sample
    alone:

        _target_: gan.Adversarial
        metrics: {generator: min}

        class Adversarial(expt.PhasedTask):
            phases = {"discriminator": "^discriminator", "generator": "^generator"}

            def phase(self, name, model, batch):
                real, fake = model(name, **batch.inputs)
                if name == "generator":
                    return functional.softplus(-fake).sum(), len(fake)
                return (functional.softplus(-real) + functional.softplus(fake)).sum(), len(fake)

        class GAN(nn.Module):
            def forward(self, phase, image, noise):
                fake = self.generator(noise)
                real = None if phase == "generator" else self.discriminator(image)
                return real, self.discriminator(fake)

    The one optimiser leaves parameters without a gradient as they are, its state included, so that
    it is one for each phase; rates of their own come from `optimizer.groups`. `model` is to be
    called once in a phase. What is reported as the loss is that of the first phase; the others are
    metrics by their names."""

    phases: Mapping[str, str] = {}
    """In their order: names, and regular expressions found in the names of the parameters that each
    trains.
    """

    @abstractmethod
    def phase(self, name: str, model: Callable[..., Any], batch: Batch) -> Sum:
        """The summed loss [] of a phase, and its weight; in an evaluation too, without gradients."""

    def forward(self, model: Callable[..., Any], batch: Batch) -> Any:
        """The losses of all phases, by name."""
        return {name: self.phase(name, model, batch) for name in self.phases}

    def loss(self, outputs: Any, batch: Batch) -> Sum:
        """That of the first phase."""
        first: Sum = outputs[next(iter(self.phases))]
        return first

    def measure(self, outputs: Any, batch: Batch) -> Mapping[str, Sum]:
        """The losses of the phases that `metrics` names."""
        return {name: outputs[name] for name in self.sums if name in outputs}


def added(one: Sum | None, other: Sum) -> Sum:
    """The sum of two sums, and of their weights."""
    total, weight = other
    total = total.detach()
    return (total, weight) if one is None else (one[0] + total, one[1] + weight)
