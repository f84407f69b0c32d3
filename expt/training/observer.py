"""Who looks on at a run, and changes nothing of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

from expt.data.loading import Batch


class Observer:
    """One worker's; this one sees nothing, and a run needs no more.

    Whoever sees something overrides the moments.
    """

    spent_s = 0.0
    """Seconds that all this has taken."""

    def watch(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """An epoch begins, or goes on, with these batches."""
        return batches

    def before_update(self) -> None:
        """A step's gradients are there; the optimiser is about to use and drop them."""

    def wants_review(self) -> bool:
        """An epoch's last step is done: whether this rank wants to look at the evaluation that
        follows.
        """
        return False

    def end_epoch(self, *, review: bool) -> None:
        """The epoch is summed and logged; `review`, alike on all ranks: rank 0 wants to look at
        evaluations.
        """

    def review(self) -> Callable[[Batch, Tensor], None] | None:
        """An evaluation begins: what is to get each batch and its logits, on all ranks or on none."""
        return None

    def end_evaluation(self, split: str) -> None:
        """It has ended, on every rank."""

    def values(self, values: Mapping[str, float]) -> None:
        """The values of some tags after the steps that are done."""

    def picture(self, tag: str, image: Tensor) -> None:
        """A picture of a person's own code, uint8 [height, width, channels] on the CPU."""

    def close(self, *, complete: bool) -> None:
        """The run ends: as it should, or in order to be resumed."""
