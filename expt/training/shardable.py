"""What of a model `fully_shard` can't share out, or would train to other weights without a word."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple
from weakref import ref

from torch import nn

from expt.training.patches.gradient_hooks import has_hooks


class Refusal(NamedTuple):
    """Why a model can't be sharded, and what would mend it: empty where nothing does."""

    why: str
    mend: str


def refusal(module: nn.Module, units: Sequence[nn.Module]) -> Refusal | None:
    """The first reason against sharding `module` by these `units`, as from `choose_units`."""
    return next(_refusals(module, units), None)


def _refusals(module: nn.Module, units: Sequence[nn.Module]) -> Iterator[Refusal]:
    if not any(parameter.requires_grad for parameter in module.parameters()):
        yield Refusal("the model has no parameter to train", "")
    for name, one in module.named_parameters():
        parameter = f"the model's parameter {name}"
        if not one.dim():
            yield Refusal(f"{parameter} has no dimension to share out", "give it the shape [1]")
        if one.requires_grad and not one.numel():
            shape = list(one.shape)
            yield Refusal(
                f"{parameter} has the shape {shape}, and no number to train", "leave it out, name it in freeze"
            )
        if one.requires_grad and one.is_complex():
            yield Refusal(f"{parameter} is complex, and has no gradient there", "keep its two parts as real numbers")
        if has_hooks(one):
            yield Refusal(f"{parameter} has a hook for its gradient, which no part of it has", "leave the hook out")
        kind = type(one)
        if kind is not nn.Parameter and issubclass(kind, nn.Parameter):
            yield Refusal(f"{parameter} is a {kind.__name__}, and a part of it is not", "give it an attribute instead")
    yield from _mixed(module, units)


def _mixed(module: nn.Module, units: Sequence[nn.Module]) -> Iterator[Refusal]:
    """Units, or the whole, whose parameters to train are of several types."""
    names = {part: name for name, part in module.named_modules()}
    taken = set[nn.Parameter]()
    for unit in [*units, module]:
        own = [one for one in unit.parameters() if one not in taken]
        taken.update(own)
        types = sorted({str(one.dtype).removeprefix("torch.") for one in own if one.requires_grad})
        if len(types) > 1:
            where = f"the unit {names[unit]}" if names[unit] else "what is in no unit"
            why = f"{where} has parameters of several types, {' and '.join(types)}"
            yield Refusal(why, "name what has its own type in sharding.wrap")


class Originals:
    """The parameters of a model before it is sharded: one that is kept elsewhere would never be trained."""

    def __init__(self, module: nn.Module) -> None:
        self._by_name: Mapping[str, ref[nn.Parameter]] = {name: ref(one) for name, one in module.named_parameters()}

    def refusal(self) -> Refusal | None:
        """The first of them that somebody still holds, once parts have taken their place."""
        if not any(one() is not None for one in self._by_name.values()):
            return None
        gc.collect()  # of circles that nobody holds
        kept = next((name for name, one in self._by_name.items() if one() is not None), None)
        why = f"the model keeps its parameter {kept} in a list or the like too, where it would never be trained"
        return Refusal(why, "take it from its module where it is used, as self.layer.weight") if kept else None
