"""What of a model `fully_shard` can't share out, or would train to other weights without a word."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from expt.training.patches.first_pass import Span
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
                f"{parameter} has the shape {shape}, and no number to train",
                "leave it out, name it in freeze",
            )
        if one.requires_grad and one.is_complex():
            yield Refusal(
                f"{parameter} is complex, and has no gradient there",
                "keep its two parts as real numbers",
            )
        if has_hooks(one):
            yield Refusal(
                f"{parameter} has a hook for its gradient, which no part of it has",
                "leave the hook out",
            )
        kind, knows_how = type(one), hasattr(one, "fsdp_pre_all_gather")  # torch asks for that
        if kind is not nn.Parameter and not knows_how and not hasattr(one, "fake_mode"):
            yield Refusal(
                f"{parameter} is a {kind.__name__}, and a part of it is not",
                "give it an attribute instead",
            )
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
    """The memory of a model's parameters before it is sharded: whoever keeps it would have first
    weights for good.
    """

    def __init__(self, module: nn.Module) -> None:
        self._spans: dict[str, tuple[ref[torch.UntypedStorage], int, int]] = {}
        for name, one in module.named_parameters():
            start = one.data_ptr()
            self._spans[name] = (
                ref(one.untyped_storage()),
                start,
                start + _extent(one) * one.element_size(),
            )

    def kept(self) -> dict[str, Span]:
        """By the name of its parameter what somebody still holds, once parts have taken its place."""
        if any(storage() is not None for storage, _, _ in self._spans.values()):
            gc.collect()  # of circles that nobody holds
        spans = (
            (name, storage(), start, end) for name, (storage, start, end) in self._spans.items()
        )
        return {
            name: Span(storage, start, end)
            for name, storage, start, end in spans
            if storage is not None
        }


def shared_memory(module: nn.Module) -> Refusal | None:
    """Of parameters and buffers the first two that have some memory together, though they are two
    tensors.
    """
    by_storage: dict[torch.UntypedStorage, list[tuple[str, Tensor]]] = {}
    for name, one in itertools.chain(module.named_parameters(), module.named_buffers()):
        if one.numel():
            by_storage.setdefault(one.untyped_storage(), []).append((name, one))
    for storage, named in by_storage.items():
        size = named[0][1].element_size()
        taken = torch.zeros(storage.nbytes() // size, dtype=torch.bool)
        if len(named) == 1 or not any(isinstance(one, nn.Parameter) for _, one in named):
            continue
        for place, (name, one) in enumerate(named):
            own = taken.as_strided(one.shape, one.stride(), one.storage_offset())
            if own.any():
                why = (
                    f"the model's {named[place - 1][0]} and {name} have their memory in common, and"
                    " parts have not"
                )
                return Refusal(why, "let it be one parameter under two names")
            own.fill_(True)
    return None


def _extent(tensor: Tensor) -> int:
    """From its first number to behind its last one in memory."""
    if not tensor.numel():
        return 0
    return 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
