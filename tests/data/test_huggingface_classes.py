"""The classes of a Hugging Face dataset, without that library."""

from __future__ import annotations

from typing import Any

from expt.data.kinds import huggingface
from tests.conftest import Configured


class Split(dict[str, list[int]]):
    """One column of a ClassLabel."""

    def __init__(self, names: list[str], cells: list[int]) -> None:
        super().__init__(label=cells)
        self.features: Any = {"label": self}
        self.names = names

    def select_columns(self, _: list[str]) -> Split:
        return self


def test_classes_are_known_by_their_names_where_a_split_counts_them_otherwise(
    configured: Configured,
) -> None:
    dataset: Any = configured("dataset=huggingface", "dataset.path=set").dataset
    splits = {
        "train": Split(["ant", "bee", "cat"], [0, 1, 2]),
        "test": Split(["cat", "bee", "ant"], [0, 1, 2]),
    }
    names, numbers = huggingface._classes(dataset, splits)
    assert names == ["ant", "bee", "cat"]
    assert numbers == {"train": [0, 1, 2], "test": [2, 1, 0]}
