"""A custom dataset of another size is refused when a run is resumed."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from expt.data.build import DataInfo
from expt.errors import DataError
from expt.features import Anything, Features
from expt.worker.first_weights import refuse_other
from tests.conftest import Configured
from tests.worker import test_divergence
from tests.worker.conftest import TrainAlone


def words(size: int) -> tuple[str, ...]:
    own = (
        f"+dataset={{_target_: {test_divergence.__name__}.Holes, bad: [], num_workers: 0, size:"
        f" {size}}}"
    )
    model = ("task=regression", "model=mlp", "model.hidden=[]", "batch_size=8", "drop_last=false")
    return ("~dataset", own, *model, "epochs=2")


def test_a_run_does_not_go_on_with_it(train_alone: TrainAlone) -> None:
    last = train_alone(*words(44), "epochs=1").paths.last

    def refused(size: int) -> str:
        with pytest.raises(DataError) as raised:
            train_alone(*words(size), source=last, name="refused")
        return str(raised.value)

    sizes = {"train": (49, 40), "val": (5, 4), "test": (54, 44)}
    found = (f"{has} samples of {one}, and had {had}" for one, (has, had) in sizes.items())
    assert f"it has {', '.join(found)}; " in refused(54)
    assert train_alone(*words(44), source=last, name="goes on").status == "completed"


def test_a_fork_may_have_fewer_to_train_on_alone(configured: Configured, tmp_path: Path) -> None:
    config = dataclasses.replace(configured(*words(44)), fork=str(tmp_path))
    saved: dict[str, Any] = {"config": {"dataset": {"train_limit": None}}, "steps_per_epoch": 3}
    saved["sizes"] = {"train_size": 40, "val_size": 4, "test_size": 44}
    info = DataInfo(
        features=Features(Anything(), Anything()), train_size=40, val_size=4, test_size=44
    )
    refuse_other(config, info, saved)
    other = dataclasses.replace(info, train_size=20)
    with pytest.raises(
        DataError, match=r"has 20 samples of train, and had 40; .*weights=RUN@last$"
    ):
        refuse_other(config, other, saved)
    limited = dataclasses.replace(
        config, dataset=dataclasses.replace(config.dataset, train_limit=20)
    )
    refuse_other(limited, other, saved)
    with pytest.raises(DataError, match="it has 43 samples of test, and had 44; "):
        refuse_other(limited, dataclasses.replace(other, test_size=43), saved)
    saved["config"]["fork"] = str(tmp_path)  # that is its own checkpoint
    with pytest.raises(DataError, match="start a new run"):
        refuse_other(limited, other, saved)
