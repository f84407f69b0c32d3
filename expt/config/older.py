"""What an older version has recorded, by the keys of today. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_OF_TRANSFORMER = {"norm": "layer", "positions": "learned", "mlp": "gelu", "bias": True}


def brought_up_to_date(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """A run's recorded settings, with each key that has come since at what was done before there
    was a choice.
    """
    ddp = dict(recorded["ddp"])
    batch_norm = "sync" if ddp.pop("sync_batchnorm", False) else "per_worker"
    at_first = {
        "task": {"name": "classification"},
        "batch_norm": batch_norm,
        "batch_norm_group": 32,
    }
    at_first |= {"weights": None, "fork": None, "freeze": []}
    settings = {**at_first, **recorded, "ddp": ddp}
    scheduler = settings["scheduler"]
    if scheduler["name"] == "_target_":
        settings["scheduler"] = {"interval": "step", **scheduler}
    of_optimizer: dict[str, Any] = {
        "decay_biases_and_norms": True,
        "layer_decay": None,
        "groups": [],
    }
    settings["optimizer"] = {**of_optimizer, **settings["optimizer"]}
    settings["optimizer"]["groups"] = [
        {"epochs": None, **group} for group in settings["optimizer"]["groups"]
    ]
    if augment := settings["dataset"].get("augment"):
        settings["dataset"] = {
            **settings["dataset"],
            "augment": {"padding_mode": "constant", **augment},
        }
    if settings["model"].get("name") == "transformer":
        settings["model"] = {**_OF_TRANSFORMER, **settings["model"]}
    return settings
