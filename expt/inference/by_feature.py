"""The inputs of a run's model, chosen by the recorded feature."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from expt.data.kinds import DatasetConfig
from expt.features import Columns, Feature, Features, Image, Text, Tokens
from expt.inference.inputs import Inputs, Pictures, Rows, Texts
from expt.inference.texts import TextRows

_BY_FEATURE: Mapping[type[Feature], type[Inputs]] = {
    Image: Pictures,
    Columns: Rows,
    Tokens: Texts,
    Text: TextRows,
}


def inputs_of(dataset: DatasetConfig, features: Features, device: Any = "cpu") -> Inputs:
    """Return the inputs of a run's model, by its dataset and the features in its record."""
    return _BY_FEATURE.get(type(features.inputs), Inputs)(dataset, features, device)
