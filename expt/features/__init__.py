"""Features: the values of a sample's inputs and of its targets, as a dataset describes them.

    feature    the contract, its record in result.json, and values of any kind
    inputs     images, columns of a table, tokens, texts
    targets    a class, labels, numbers, a mask

A module imports without torch and NumPy: the driver reads records. A new kind is a subclass of
Feature, imported by the task that takes it.
"""

from __future__ import annotations

from expt.features.feature import Answers, Anything, Feature, Features, at_least_single, noun_of
from expt.features.inputs import NO_TARGET, ROLES, Columns, Encoding, Image, Text, Tokens
from expt.features.targets import Classes, Labels, Mask, Numbers

__all__ = [
    "NO_TARGET", "ROLES", "Answers", "Anything", "Classes", "Columns", "Encoding", "Feature",
    "Features", "Image", "Labels", "Mask", "Numbers", "Text", "Tokens", "at_least_single",
    "noun_of",
]  # fmt: skip
