"""Plan a prediction: which samples the model of a run is applied to; free of torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from expt.data.folders import parts_there
from expt.errors import ConfigError
from expt.features import Feature
from expt.inference.several import check_together, shared
from expt.inference.tables import inputs_of
from expt.runs.request import Trained
from expt.runs.tags import SPLITS


class Plan:
    """The plan of a prediction; see `python -m expt predict --help`."""

    def __init__(
        self,
        runs: Sequence[tuple[Path, str]],
        paths: Sequence[Path] = (),
        *,
        flips: bool = False,
        split: str | None = None,
        batch_size: int | None = None,
        device: str = "auto",
        amp: Any = "recorded",
        top: int | None = None,
        texts: Sequence[str] = (),
        trust_code: bool = False,
    ) -> None:
        """Raise ConfigError for no run, unlike ones, and samples that they do not take.

        The `runs` are folders, each with a checkpoint.
        """
        self.split, self.batch_size, self.flips = split, batch_size, flips
        self.device, self.amp, self.trust_code = device, amp, trust_code
        self.runs = [Trained.read(*run) for run in runs]
        self.run, _, self.config, self.record = self.runs[0]
        self.data: dict[str, Any] = self.record["data"]
        self.features = self.runs[0].features
        self._check([*paths, *texts])
        check_together(self.runs, split, flips=flips)
        form = self.config.task.outputs(self.features.targets)
        self.form: Feature = form if top is None else form.likeliest(top)
        self.ways, self.rounds = shared(self.runs, split)
        first = ((way, self.runs[way]) for way in dict.fromkeys(self.ways))
        self.readers = {way: inputs_of(run.config.dataset, run.features) for way, run in first}
        for reader in self.readers.values():
            if texts:
                reader.take(texts)
            if paths:
                reader.open(paths)
        self.inputs = self.readers[0]

    def _check(self, paths: Sequence[object]) -> None:
        split = self.split
        if bool(paths) == bool(split):
            raise ConfigError(
                "name files or folders, or --split test for a part of the run's dataset"
            )
        there = [name for name in SPLITS if self.data.get(f"{name}_size", 0) != 0]
        if split is not None and split not in there:
            raise ConfigError(f"--split {split}: the run's dataset has {', '.join(there)}")
        if self.batch_size is not None and self.batch_size < 1:
            raise ConfigError(f"--batch-size {self.batch_size}: must be 1 or more")

    @property
    def total(self) -> int | None:
        """The number of samples, where it is known before they are read."""
        return self.inputs.size if self.split is None else self.data[f"{self.split}_size"]

    @property
    def noun(self) -> str:
        """The noun for a sample."""
        return self.inputs.noun if self.split is None else self.features.inputs.noun

    @property
    def masks_root(self) -> str:
        """The folder below which all pictures lie, absolute."""
        if self.split is None:
            folders = (os.path.dirname(os.path.abspath(file)) for file in self.inputs.files)
            return os.path.commonpath([*folders])
        root = os.path.abspath(getattr(self.config.dataset, "root", ""))
        parts = {"train": Path(root)} | parts_there(root)
        return str(parts.get(self.split, parts["train"]) / "images")
