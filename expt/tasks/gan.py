"""The two updates of a generative adversarial network: an example of a task with phases."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import softplus

from expt.data.loading import Batch
from expt.tasks.task import PhasedTask, Sum


class Adversarial(PhasedTask):
    """The non-saturating losses of Goodfellow et al. 2014, of logits of real and generated images.

    First the discriminator learns to tell them apart, then the generator to be taken for real.
    Where neither is ahead, `loss`, the discriminator's, is 2 ln 2 = 1.39, the metric `generator`
    ln 2 = 0.69, and `d_real` and `d_fake`, the shares of real and of generated images that are
    taken for real, are 0.5.
    """

    phases = {"discriminator": "^discriminator", "generator": "^generator"}

    def phase(self, name: str, model: Any, batch: Batch, outputs: dict[str, Any]) -> Sum:
        """Return the loss of the discriminator, or of the generator."""
        if name == "generator":
            fake = model.discriminator(outputs["images"])
            return softplus(-fake).sum(), len(fake)
        outputs["images"] = model.generator(batch.inputs["noise"])
        both = torch.cat((batch.inputs["image"], outputs["images"]))
        real, fake = model.discriminator(both).chunk(2)
        outputs["d_real"] = real.sigmoid().sum(), len(real)
        outputs["d_fake"] = fake.sigmoid().sum(), len(fake)
        return (softplus(-real) + softplus(fake)).sum(), len(fake)
