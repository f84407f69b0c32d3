"""Muon for a model's weight matrices and AdamW for all else, as one optimiser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn, optim
from torch.optim import Optimizer

from expt.config import groups
from expt.errors import ConfigError
from expt.training.optimizer_state import fused_or_foreach
from expt.training.patches.unguarded import optimizer as without_guards

Groups = list[dict[str, Any]]


def build_muon(
    config: groups.Muon, module: nn.Module, chosen: list[nn.Parameter] | Groups, *, unguarded: bool
) -> Optimizer:
    """Both over the `chosen` parameters of `module`, or groups of them.

    Muon's update is as large as AdamW's, so that one learning rate and one weight decay do (Liu et
    al., 2025). Raises ConfigError where there is nothing for Muon to do."""
    matrices = hidden_matrices(module)
    if not matrices:
        raise ConfigError(
            "optimizer=muon: the model has no weight matrix but for its last layer and embeddings;"
            " use optimizer=adamw"
        )
    muon, adamw, both = optim.Muon, optim.AdamW, MuonWithAdamW
    if unguarded:
        muon, adamw, both = without_guards(muon), without_guards(adamw), without_guards(both)
    lr, decay = config.lr, config.weight_decay
    of_muon, of_adamw = _parted(chosen, matrices)
    members = [one for group in of_adamw for one in group["params"]]
    return both(
        muon(
            of_muon,
            lr=lr,
            weight_decay=decay,
            momentum=config.momentum,
            nesterov=config.nesterov,
            adjust_lr_fn="match_rms_adamw",
        ),
        adamw(
            of_adamw,
            lr=lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=decay,
            **fused_or_foreach(members),
        ),
    )


def hidden_matrices(module: nn.Module) -> set[nn.Parameter]:
    """The weights with two dimensions, but for embeddings' and the last layer's, whose rows are
    words and classes.
    """
    embeddings = {
        parameter
        for layer in module.modules()
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag)
        for parameter in layer.parameters()
    }
    named = module.named_parameters(
        remove_duplicate=False
    )  # a last layer may share its weights with an embedding
    matrices = [
        parameter for name, parameter in named if name.endswith("weight") and parameter.dim() == 2
    ]
    return {*matrices} - embeddings - {*matrices[-1:]}


def _parted(
    chosen: list[nn.Parameter] | Groups, matrices: set[nn.Parameter]
) -> tuple[Groups, Groups]:
    """The groups for Muon, and those for AdamW."""
    grouped = [one for one in chosen if isinstance(one, dict)]
    parts: tuple[Groups, Groups] = ([], [])
    for group in grouped or [{"params": chosen}]:
        for part, wanted in zip(parts, (True, False), strict=True):
            if members := [
                parameter for parameter in group["params"] if (parameter in matrices) == wanted
            ]:
                part.append({**group, "params": members})
    return parts


class MuonWithAdamW(Optimizer):
    """The groups of both, Muon's first, and one state, which is saved and loaded as any
    optimiser's.
    """

    def __init__(self, muon: optim.Muon, adamw: optim.AdamW) -> None:
        self._parts: Sequence[Optimizer] = (muon, adamw)
        shared = {key: muon.defaults[key] for key in ("lr", "weight_decay")}
        super().__init__([*muon.param_groups, *adamw.param_groups], shared)
        self._share()

    def _share(self) -> None:
        """Let the parts work on the groups and the state that are here."""
        first = len(self._parts[0].param_groups)
        for part, own in zip(
            self._parts, (self.param_groups[:first], self.param_groups[first:]), strict=True
        ):
            part.param_groups, part.state = own, self.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        for part in self._parts:
            part.step()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` gave."""
        super().load_state_dict(dict(state_dict))
        self._share()
