"""Groups of samples that are held out together, each as a whole, and with each class's share."""

from __future__ import annotations

import torch
from torch import Tensor

_TRIED = 200_000
"""Groups that are gone through, in other orders, to come near to the shares of classes."""
_ORDERS = 20


class _Groups:
    """The samples of each class in each group, and the shares that they come near to."""

    def __init__(self, groups: Tensor, classes: Tensor | None, seed: int) -> None:
        named, self.members = torch.unique(groups, return_inverse=True)
        strata = torch.zeros_like(self.members)
        if classes is not None:
            strata = torch.unique(classes, return_inverse=True)[1]
        self.number, width = len(named), int(strata.max()) + 1
        pairs, counts = torch.unique(self.members * width + strata, return_counts=True)
        self.counts: list[list[tuple[int, int]]] = [[] for _ in range(self.number)]
        """The classes in each group, and the number of samples of each."""
        for pair, count in zip(pairs.tolist(), counts.tolist(), strict=True):
            self.counts[pair // width].append((pair % width, count))
        self.of_classes: list[float] = strata.bincount().double().tolist()
        self._generator = torch.Generator().manual_seed(seed)

    def drawn(self) -> list[int]:
        """Return the groups in a drawn order."""
        found: list[int] = torch.randperm(self.number, generator=self._generator).tolist()
        return found

    def gain(self, group: int, lacking: list[float]) -> float:
        """Return how much less a part is `lacking` of each class with a group."""
        pairs = self.counts[group]
        return sum(n * (2 * lacking[each] - n) / self.of_classes[each] for each, n in pairs)

    def add(self, group: int, lacking: list[float]) -> None:
        """Take a group into a part."""
        for each, count in self.counts[group]:
            lacking[each] -= count


def held_out(groups: Tensor, classes: Tensor | None, number: int, seed: int) -> Tensor:
    """Return whether each sample is held out, bool [N]: about `number`, in whole groups, not all.

    There are two groups or more, and one at least is held out. Of groups in a drawn order each is
    taken that brings the numbers of each class nearer to its share; of several orders the best.
    """
    known = _Groups(groups, classes, seed)
    wanted = [number / len(groups) * count for count in known.of_classes]
    best, least = list[int](), float("inf")
    for _ in range(max(1, min(_ORDERS, _TRIED // known.number))):
        lacking, taken, order = [*wanted], list[int](), known.drawn()
        for group in order:
            if len(taken) < known.number - 1 and known.gain(group, lacking) > 0:
                known.add(group, lacking)
                taken.append(group)
        if not taken:
            taken = [max(order, key=lambda group: known.gain(group, wanted))]
            known.add(taken[0], lacking)
        away = sum(x * x / n for x, n in zip(lacking, known.of_classes, strict=True))
        if away < least - 1e-9:
            best, least = taken, away
    found = torch.zeros(known.number, dtype=torch.bool)
    found[best] = True
    return found[known.members]


def folds(groups: Tensor, classes: Tensor, number: int, seed: int) -> Tensor:
    """Return the fold of each sample, int64 [N], of a `number` that is not above the groups'.

    The largest groups come first, each to the fold that lacks most of its classes.
    """
    known = _Groups(groups, classes, seed)
    lacking = [[count / number for count in known.of_classes] for _ in range(number)]
    found = torch.empty(known.number, dtype=torch.int64)
    sizes = [sum(count for _, count in each) for each in known.counts]
    for group in sorted(known.drawn(), key=lambda group: -sizes[group]):
        ways = [(known.gain(group, each), sum(each)) for each in lacking]
        found[group] = fold = ways.index(max(ways))
        known.add(group, lacking[fold])
    return found[known.members]
