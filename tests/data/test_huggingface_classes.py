"""The classes of a Hugging Face dataset, without that library."""

from __future__ import annotations

from types import SimpleNamespace

from expt.data.kinds import huggingface
from expt.data.kinds.huggingface import HuggingFace
from tests.conftest import Configured


def test_classes_are_known_by_their_names_where_a_split_counts_them_otherwise(
    configured: Configured,
) -> None:
    dataset = configured("dataset=huggingface", "dataset.path=set").dataset
    assert isinstance(dataset, HuggingFace)
    assert isinstance(dataset.target, str)
    test = SimpleNamespace(features={dataset.target: SimpleNamespace(names=["cat", "bee", "ant"])})
    train = ["ant", "bee", "cat"]
    named = huggingface._by_name(test, train, [0, 1, 2], dataset.target)
    assert huggingface._numbers(named, train, dataset.target, "test") == [2, 1, 0]
