"""What a run's model says of samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pandas import DataFrame


class Predictions(list[dict[str, Any]]):
    """Of each sample, in order: where it is from, and what the run's model says of it; keys as in a
    .jsonl.
    """

    skipped: Sequence[str] = ()
    """What could not be read, a line each; it is left out of the list."""

    def __repr__(self) -> str:
        lines = [
            f"expt.Predictions of {len(self):,} samples",
            *(f"  {record}" for record in self[:3]),
        ]
        more = [f"  ... {len(self) - 3:,} more; .to_pandas() is a table"] if len(self) > 3 else []
        return "\n".join([*lines, *more])

    def to_pandas(self) -> DataFrame:
        """A row for each sample, with the columns of a .csv. Raises ImportError without pandas."""
        from pandas import DataFrame

        from expt.inference.writing import flat

        return DataFrame([flat(record) for record in self])
