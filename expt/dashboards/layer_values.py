"""Norms and histograms of a model's layers, for TensorBoard."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from expt.config.schema import TensorBoard
from expt.dashboards.events import Writer
from expt.runs import tags
from expt.training import sharding
from expt.training.learner import Learner


class LayerValues:
    """Norms or histograms of each layer's gradients and weights after an epoch's last step."""

    def __init__(self, learner: Learner, settings: TensorBoard) -> None:
        self._learner, self._settings = learner, settings
        self._layers = layers(learner.module)
        self._gradient_norms: dict[str, Tensor] = {}
        """Those of each layer that has some."""
        self._gradients: dict[str, Tensor] = {}
        """Those of each parameter that has one."""

    def note_gradients(self) -> None:
        """Note the gradients before the optimizer drops them, in each update of the last step.

        An update of some parameters leaves the others' as they were noted. Waits for no device.
        """
        scale = self._learner.precision.scale
        for layer, parameters in self._layers.items():
            found = {name: each.grad for name, each in parameters.items() if each.grad is not None}
            if found and self._settings.norms:
                self._gradient_norms[layer] = norm([*found.values()]) / scale
            if self._settings.histograms:
                self._gradients |= {name: gradient / scale for name, gradient in found.items()}

    def show(self, events: Writer | None, step: int) -> None:
        """Add the noted gradients, and the weights; a collective of a sharded model's ranks."""
        if self._layers and self._settings.norms:
            norms = self._norms()
            if events:
                events.write(step, norms)
            self._gradient_norms = {}
        if self._settings.histograms:
            for name, weight in itertools.chain(*(each.items() for each in self._layers.values())):
                parts = {"weights": weight.detach(), "gradients": self._gradients.get(name)}
                for kind, part in parts.items():
                    values = None if part is None else sharding.whole(part).to_dense()
                    if events and values is not None and bool(values.isfinite().all()):
                        events.histogram(f"{kind}/{name}", values, step)
            self._gradients = {}

    def _norms(self) -> Mapping[str, float]:
        """Return the norms by their tags; of gradients those that some worker has noted."""
        weights = {layer: norm([*each.values()]) for layer, each in self._layers.items()}
        none, noted = torch.zeros_like(next(iter(weights.values()))), self._gradient_norms
        rows = [
            torch.stack([noted.get(layer, none) for layer in weights]),
            torch.stack([*weights.values()]),
            torch.tensor([float(layer in noted) for layer in weights], device=none.device),
        ]
        table, strategy = torch.stack(rows), self._learner.strategy
        if strategy.shards > 1:
            squares, size = table.double() ** 2, strategy.world_size
            table = sharding.sum_over_shards(squares, strategy.shards, size).sqrt()
        gradients, of_weights, are_noted = table.tolist()
        every = zip(weights, gradients, of_weights, are_noted, strict=True)
        found = dict[str, float]()
        for layer, gradient, weight, is_noted in every:
            found[f"{tags.WEIGHT_NORM}/{layer}"] = weight
            if is_noted:
                found[f"{tags.GRADIENT_NORM}/{layer}"] = gradient
        return found


def layers(module: nn.Module) -> dict[str, dict[str, nn.Parameter]]:
    """Return each submodule's trained parameters that are not empty, by their full names."""
    found: dict[str, dict[str, nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.numel():
            found.setdefault(name.rpartition(".")[0] or "model", {})[name] = parameter
    return found


def norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of tensors together, float32 [], of this worker's shards.

    Waits for no device.
    """
    each = [torch.linalg.vector_norm(sharding.local(one.detach())).float() for one in tensors]
    return torch.stack(each).square().sum().sqrt()
