"""A model's weights and gradients, layer by layer: how large they are, and all their values."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from expt.dashboards.events import Writer
from expt.runs import tags
from expt.training import sharding
from expt.training.learner import Learner


class LayerValues:
    """What an epoch's last step did to each layer: the norms of its gradients and weights, or all
    of their values.
    """

    def __init__(self, learner: Learner, *, norms: bool, histograms: bool) -> None:
        self._learner, self._norms, self._histograms = learner, norms, histograms
        self._layers = layers(learner.module)
        self._gradient_norms: Tensor | None = None
        self._gradients: dict[str, Tensor] = {}

    def note_gradients(self) -> None:
        """Note the gradients before the optimiser drops them; not where some are missing.

        Waits for no device.
        """
        trained = list(itertools.chain.from_iterable(self._layers.values()))
        if not trained or any(parameter.grad is None for _, parameter in trained):
            return
        scale = self._learner.precision.scale
        if self._norms:
            gradients = [
                [p.grad for _, p in own if p.grad is not None] for own in self._layers.values()
            ]
            self._gradient_norms = norms(gradients) / scale
        if self._histograms:
            self._gradients = {name: p.grad / scale for name, p in trained if p.grad is not None}

    def show(self, events: Writer | None, step: int) -> None:
        """Add what was noted, and the weights of now; of a sharded model a collective, whoever has
        `events`.
        """
        if self._gradient_norms is not None:
            weights = norms([[p.detach() for _, p in own] for own in self._layers.values()])
            both = self._of_all(torch.stack([self._gradient_norms, weights])).tolist()
            for kind, values in zip((tags.GRADIENT_NORM, tags.WEIGHT_NORM), both, strict=True):
                named = (f"{kind}/{layer}" for layer in self._layers)
                if events:
                    events.write(step, dict(zip(named, values, strict=True)))
            self._gradient_norms = None
        if self._histograms:
            self._show_histograms(events, step)

    def _of_all(self, norms: Tensor) -> Tensor:
        """The norms of the whole model's layers, from those of this worker's part."""
        learner = self._learner
        if learner.shards == 1:
            return norms
        return sharding.sum_over_shards(
            norms.double() ** 2, learner.shards, learner.world_size
        ).sqrt()

    def _show_histograms(self, events: Writer | None, step: int) -> None:
        for name, parameter in itertools.chain.from_iterable(self._layers.values()):
            for kind, part in (
                ("weights", parameter.detach()),
                ("gradients", self._gradients.get(name)),
            ):
                values = None if part is None else sharding.whole(part)
                if events and values is not None and bool(values.isfinite().all()):
                    events.histogram(f"{kind}/{name}", values, step)
        self._gradients = {}


def layers(module: nn.Module) -> dict[str, list[tuple[str, nn.Parameter]]]:
    """The trained parameters of each submodule that has some of its own, with their names in the
    whole model.

    Without those that are empty, of which there is nothing to show.
    """
    found: dict[str, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.numel():
            found.setdefault(name.rpartition(".")[0] or "model", []).append((name, parameter))
    return found


def norms(tensors: Sequence[Sequence[Tensor]]) -> Tensor:
    """The 2-norm of each group of tensors, float32 [groups], of sharded ones of their part.

    Waits for no device.
    """
    flat = [sharding.local(tensor) for group in tensors for tensor in group]
    if not flat:
        return torch.zeros(len(tensors))
    each = torch.stack([torch.linalg.vector_norm(tensor).float() for tensor in flat])
    group = _group_of_each(tuple(map(len, tensors)), each.device)
    return torch.zeros(len(tensors), device=each.device).index_add_(0, group, each**2).sqrt()


@functools.lru_cache(maxsize=4)  # to copy it to a GPU waits for it
def _group_of_each(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor([group for group, size in enumerate(sizes) for _ in range(size)]).to(device)


def parameter_table(module: nn.Module) -> str:
    """Markdown: every parameter's name, layer, shape, type and size, and the totals."""
    layer = {name: type(part).__name__ for name, part in module.named_modules()}
    rows = [
        f"| {name} | {layer[name.rpartition('.')[0]]} |"
        f" {' x '.join(map(str, parameter.shape)) or '1'} |"
        f" {str(parameter.dtype).removeprefix('torch.')} |"
        f" {parameter.numel():,}{'' if parameter.requires_grad else ' (not trained)'} |"
        for name, parameter in module.named_parameters()
    ]
    total = sum(parameter.numel() for parameter in module.parameters())
    trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    head = ["| parameter | layer | shape | type | numbers |", "|---|---|---|---|--:|"]
    return "\n".join([*head, *rows, f"| **{trained:,} trained** | | | | **{total:,}** |"])
