"""The two updates of a generative adversarial network: an example of a task with phases."""

from __future__ import annotations

from typing import Any

from torch.nn.functional import softplus

from expt.data.loading import Batch
from expt.tasks.task import PhasedTask, Sum


class Adversarial(PhasedTask):
    """The non-saturating losses of Goodfellow et al. 2014, of logits of real and generated images.

    First the discriminator learns to tell them apart, then the generator to be taken for real.
    Where neither is ahead, `loss`, the discriminator's, is 2 ln 2 = 1.39, and the metric
    `generator` ln 2 = 0.69.
    """

    phases = {"discriminator": "^discriminator", "generator": "^generator"}

    def phase(self, name: str, model: Any, batch: Batch) -> Sum:
        """Return the loss of the discriminator, or of the generator."""
        real, fake = model(name, **batch.inputs)
        if name == "generator":
            return softplus(-fake).sum(), len(fake)
        return (softplus(-real) + softplus(fake)).sum(), len(fake)
