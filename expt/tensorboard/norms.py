"""How large a model's weights and gradients are, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from expt.training.patches.foreach_norm import norms_of


def layers(module: nn.Module) -> dict[str, list[tuple[str, nn.Parameter]]]:
    """The trained parameters of each submodule that has some of its own, with their names in the whole model."""
    found: dict[str, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            found.setdefault(name.rpartition(".")[0] or "model", []).append((name, parameter))
    return found


def norms(tensors: Sequence[Sequence[Tensor]]) -> Tensor:
    """The 2-norm of each group of tensors, float32 [groups]. Waits for no device."""
    flat = [tensor for group in tensors for tensor in group]
    if not flat:
        return torch.zeros(len(tensors))
    each = torch.stack([norm.float() for norm in norms_of(flat)])
    sizes = torch.tensor([len(group) for group in tensors])
    group = torch.arange(len(tensors)).repeat_interleave(sizes).to(each.device)
    return torch.zeros(len(tensors), device=each.device).index_add_(0, group, each**2).sqrt()


def parameter_table(module: nn.Module) -> str:
    """Markdown: every parameter's name, layer, shape, type and size, and the totals."""
    layer = {name: type(part).__name__ for name, part in module.named_modules()}
    rows = [
        f"| {name} | {layer[name.rpartition('.')[0]]} | {' x '.join(map(str, parameter.shape)) or '1'} "
        f"| {str(parameter.dtype).removeprefix('torch.')} "
        f"| {parameter.numel():,}{'' if parameter.requires_grad else ' (not trained)'} |"
        for name, parameter in module.named_parameters()
    ]
    total = sum(parameter.numel() for parameter in module.parameters())
    trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    head = ["| parameter | layer | shape | type | numbers |", "|---|---|---|---|--:|"]
    return "\n".join([*head, *rows, f"| **{trained:,} trained** | | | | **{total:,}** |"])
