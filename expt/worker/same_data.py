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


def refuse_other(
    config: RunConfig, info: DataInfo, saved: Mapping[str, Any], *, steps_per_epoch: int
) -> None:
    """Raise DataError where the data is of other sizes than when the checkpoint `saved` was
    written: it is other data.

    A checkpoint of an older version knows the steps of an epoch alone. A fork may have another
    `train_limit`."""
    settings, sizes = saved["config"], saved.get("sizes")
    is_fork = config.fork not in (None, settings.get("fork"))
    compared = dict(_OF)
    if is_fork and settings["dataset"].get("train_limit") != config.dataset.train_limit:
        del compared["train_size"]
    others: dict[str, tuple[int, int]] = {}
    if sizes is not None:
        others = {
            of: (info.sizes[key], sizes[key])
            for key, of in compared.items()
            if info.sizes[key] != sizes[key]
        }
    elif (
        not is_fork and (before := saved.get("steps_per_epoch", steps_per_epoch)) != steps_per_epoch
    ):
        others = {"batches in an epoch": (steps_per_epoch, before)}
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
