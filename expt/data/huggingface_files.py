"""The files of a Hugging Face dataset in a folder. Free of torch, and of that library."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from expt.config.datasets import HuggingFace
from expt.data.folders import walked
from expt.errors import ConfigError, DataError

NEEDS = "dataset=huggingface: needs the package datasets; pip install 'expt[datasets]'"


def check(dataset: HuggingFace) -> None:
    """Raise ConfigError without the library, DataError without the folder or for an empty one."""
    found = importlib.util.find_spec("datasets")
    if found is None or found.origin is None:  # a folder of that name
        raise ConfigError(NEEDS)
    if not Path(dataset.path).is_dir():
        raise DataError(
            f"dataset.path={dataset.path}: there is no such folder; nothing is fetched from the"
            " Hub: download a dataset there, as in hf download NAME --repo-type dataset"
            " --local-dir FOLDER"
        )
    if not files(dataset):
        raise DataError(
            f"dataset.path={dataset.path}: holds no files; give the folder of a dataset"
        )


def files(dataset: HuggingFace) -> list[str]:
    """Its files by their paths below the folder, sorted; without hidden ones, as those of a
    download's state.
    """
    found = list[str]()
    for where, folders, names in walked(dataset.path):
        folders[:] = [name for name in folders if not name.startswith(".")]
        below = os.path.relpath(where, dataset.path)
        found += [
            os.path.normpath(os.path.join(below, name))
            for name in names
            if not name.startswith(".")
        ]
    return sorted(found)
