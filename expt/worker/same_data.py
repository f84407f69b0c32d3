"""Whether a run that goes on has as many samples as before: of what an own dataset reads, nothing
else is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from expt.config.schema import RunConfig
from expt.data.build import DataInfo
from expt.errors import DataError

_VERBS = {"train": "train", "val": "validate", "test": "test"}
_OF = {f"{part}_size": f"samples to {verb} on" for part, verb in _VERBS.items()}


def refuse_other(config: RunConfig, info: DataInfo, saved: Mapping[str, Any]) -> None:
    """Raise DataError where the data has other sizes than when the checkpoint `saved` was written.

    A fork may have another `train_limit`.
    """
    settings = saved["config"]
    is_fork = config.fork not in (None, settings.get("fork"))
    compared = dict(_OF)
    if is_fork and settings["dataset"].get("train_limit") != config.dataset.train_limit:
        del compared["train_size"]
    pairs = {of: (info.sizes[key], saved["sizes"][key]) for key, of in compared.items()}
    others = {of: pair for of, pair in pairs.items() if pair[0] != pair[1]}
    if others:
        now, then = (", ".join(f"{both[at]} {of}" for of, both in others.items()) for at in (0, 1))
        target = getattr(config.dataset, "target", None)
        mend = (
            "begin a further run with its weights, by weights=RUN@last"
            if is_fork
            else "start a new run"
        )
        raise DataError(
            f"dataset{f'._target_={target}' if target else ''}: is not what the run to go on from"
            f" was trained on: it has {now}, and had {then}; give the same data, or {mend}"
        )
