"""Where a run resumes: the checkpoint that is found, the best that stays beside it, what may have
changed.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest

from expt.config.constraints import Target
from expt.config.identity import Content, shown
from expt.config.schema import EarlyStop, RunConfig
from expt.errors import CheckpointError, ConfigError
from expt.runs import checkpoint, checkpoint_file, resume
from expt.runs.paths import RunPaths
from expt.runs.result import create_result, update_result
from tests.conftest import Configured


def state(config: RunConfig, step: int, best: int | None, **more: Any) -> dict[str, Any]:
    """What a checkpoint says after `step` steps, when the best was reached at another."""
    return {
        "model": {},
        "workers": [],
        "config": shown(config),
        "position": {"epoch": 1, "step": step, "step_in_epoch": 0},
        "metrics_bytes": 10 * step,
        "best": best and {"metric": "loss/val", "value": 1 / best, "epoch": best},
        "is_best": best == step,
        **more,
    }


@pytest.fixture
def config(configured: Configured) -> RunConfig:
    return configured()


@pytest.fixture
def paths(tmp_path: Path, config: RunConfig) -> RunPaths:
    """A run whose last checkpoint is of step 3, the one before of step 2, and the best of step 1."""
    paths = RunPaths(tmp_path / "run")
    for step in (1, 2, 3):
        checkpoint.save(paths.last, state(config, step, best=1), keep=1)
        if step == 1:
            checkpoint_file.keep_as(paths.last, paths.best)
    paths.metrics.write_text("123456789\n" * 5)
    return paths


def step_of(path: Path) -> int:
    step: int = checkpoint.load(path)["position"]["step"]
    return step


def test_the_newest_whole_one_is_found(
    config: RunConfig, paths: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where none is, the message names a mend, which does mend it."""
    assert resume.find(config, Content(), paths, may_have_run=True) == paths.last
    paths.last.write_bytes(b"damaged")
    found = resume.find(config, Content(), paths, may_have_run=True)
    assert found is not None
    assert step_of(found) == 2
    found.write_bytes(b"damaged too")
    for problem in (
        "no checkpoint is left to go on from: .*",
        f"{paths.checkpoints}: every checkpoint there is damaged",
    ):
        with pytest.raises(
            CheckpointError, match=f"{problem}; .* or remove the folder {paths.checkpoints}:"
        ):
            resume.find(config, Content(), paths, may_have_run=True)
    shutil.rmtree(paths.checkpoints)
    assert resume.find(config, Content(), paths, may_have_run=True) is None
    assert (
        f"{paths.folder}: has no checkpoint, the run starts from the beginning"
        in capsys.readouterr().err
    )


def test_a_new_run_looks_for_none(config: RunConfig, paths: RunPaths) -> None:
    assert resume.find(config, Content(), paths, may_have_run=False) is None


def test_what_no_run_has_left_is_not_set_aside(config: RunConfig, tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.checkpoints.mkdir()
    paths.last.write_text("of another program")
    with pytest.raises(
        ConfigError, match=r"no result\.json says that a run is there, and no checkpoint is left"
    ):
        resume.find(config, Content(), paths, may_have_run=True)
    assert [path.name for path in paths.checkpoints.iterdir()] == ["last.pt"]


def test_points_after_the_checkpoint_are_cut_off_and_the_best_stays(paths: RunPaths) -> None:
    assert resume.cut_back(paths.last, paths) == {"checkpoint": str(paths.last), "step": 3}
    assert paths.metrics.stat().st_size == 30
    assert step_of(paths.best) == 1, "not the one that is resumed from"


def test_a_best_that_is_damaged_is_not_tested_at_the_end(
    paths: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    content = bytearray(paths.best.read_bytes())
    content[len(content) // 2] ^= 1
    paths.best.unlink()
    paths.best.write_bytes(content)
    resume.cut_back(paths.last, paths)
    assert (
        "truncated or damaged, its checksum is not that of best.pt.sha256; set aside as"
        in capsys.readouterr().err
    )
    assert not paths.best.exists()


def test_a_best_that_is_gone_is_taken_from_the_older_checkpoints(
    config: RunConfig, paths: RunPaths
) -> None:
    for step in (4, 5):
        checkpoint.save(
            paths.last, state(config, step, best=4), keep=1
        )  # of the second `best` is what it knows of
    resume.cut_back(paths.last, paths)
    assert step_of(paths.best) == 4


def test_in_a_new_folder_the_best_comes_along(paths: RunPaths, tmp_path: Path) -> None:
    new = RunPaths(tmp_path / "new")
    new.folder.mkdir()
    resume.cut_back(paths.last, new)
    assert new.metrics.read_text() == "123456789\n" * 3
    assert step_of(new.best) == 1


def test_a_checkpoint_that_is_the_best_becomes_it(config: RunConfig, paths: RunPaths) -> None:
    checkpoint.save(paths.last, state(config, 4, best=4))  # and then it was killed
    resume.cut_back(paths.last, paths)
    assert step_of(paths.best) == 4


def test_a_best_of_later_is_not_taken_for_that_of_then(
    config: RunConfig, paths: RunPaths, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint.save(paths.best, state(config, 5, best=5))
    new = RunPaths(tmp_path / "new")
    new.folder.mkdir()
    resume.cut_back(paths.last, new)
    assert "is not the best that last.pt knows of" in capsys.readouterr().err
    assert not new.best.exists()


OTHER: dict[str, Any] = {
    "seed": 1, "batch_size": 128, "label_smoothing": 0.1, "gradient_clip": 1.0, "drop_last": False,
    "eval_split": "test", "objective": "loss/val", "amp": "bf16", "lr_scaling": "linear",
}  # fmt: skip
SAME: dict[str, Any] = {
    "epochs": 20, "max_steps": 5, "log_every": 3, "world_size": 2, "gradient_accumulation": 2, "timeout_s": 5.0,
    "max_restarts": 3, "threads": 2, "profile": True, "compile": True, "on_nan": "skip",
    "early_stop": EarlyStop(metric="loss/val", patience=3), "callbacks": (Target(target="mine.Watch", kwargs={}),),
}  # fmt: skip


@pytest.mark.parametrize("key", OTHER)
def test_what_is_trained_may_not_change(key: str, config: RunConfig, paths: RunPaths) -> None:
    with pytest.raises(ConfigError, match=f"{key}={OTHER[key]}: the checkpoint is of a run with"):
        resume.find(
            dataclasses.replace(config, **{key: OTHER[key]}), Content(), paths, may_have_run=True
        )


@pytest.mark.parametrize("key", SAME)
def test_how_it_is_trained_may(key: str, config: RunConfig, paths: RunPaths) -> None:
    assert (
        resume.find(
            dataclasses.replace(config, **{key: SAME[key]}), Content(), paths, may_have_run=True
        )
        == paths.last
    )


@pytest.mark.parametrize(
    "words",
    [
        ["optimizer.lr=0.1"],
        ["scheduler=cosine"],
        ["model.hidden=[32]"],
        ["dataset.val_fraction=0.2"],
    ],
)
def test_nor_may_a_groups_settings(
    words: list[str], configured: Configured, paths: RunPaths
) -> None:
    with pytest.raises(ConfigError, match=words[0].partition("=")[0]):
        resume.find(configured(*words), Content(), paths, may_have_run=True)


@pytest.mark.parametrize(
    ("key", "value", "done"), [("epochs", 2, "epoch 3"), ("max_steps", 40, "step 50")]
)
def test_a_run_is_not_made_shorter_than_it_is(
    key: str, value: Any, done: str, config: RunConfig, paths: RunPaths
) -> None:
    checkpoint.save(
        paths.last,
        state(config, 50, best=1, position={"epoch": 3, "step": 50, "step_in_epoch": 10}),
    )
    enough: Any
    for enough in (value + 10, 50):
        assert resume.find(
            dataclasses.replace(config, **{key: enough}), Content(), paths, may_have_run=True
        )
    with pytest.raises(
        ConfigError, match=f"{key}={value}: the run of .* has come to {done} already"
    ):
        resume.find(
            dataclasses.replace(config, **{key: value}), Content(), paths, may_have_run=True
        )


OWN = ("~scheduler.warmup_epochs", "+scheduler._target_=torch.optim.lr_scheduler.OneCycleLR")
PLANS: dict[str, tuple[tuple[str, ...], dict[str, Any], tuple[str, ...], str]] = {
    # of a run of epochs=4, 10 steps an epoch: its schedule, the checkpoint's plan, what is asked,
    # what is said
    "constant": (("scheduler=constant",), {"plan": None}, ("epochs=9",), ""),
    "step": (("scheduler=step",), {"plan": None}, ("epochs=9",), ""),
    "plateau": (("scheduler=plateau",), {"plan": None}, ("epochs=9",), ""),
    "the same end": (("scheduler=cosine",), {"plan": 40}, ("epochs=4",), ""),
    "cosine": (
        ("scheduler=cosine", "scheduler.min_lr=0.001"),
        {"plan": 40},
        ("epochs=9",),
        "epochs=9: the schedule of {} is planned to the run's end, epochs=4, and one with another end has had other "
        "learning rates until here; keep its plan by scheduler.epochs=4, after which the learning rate stays where it "
        "ends, or begin a further run, with a schedule of its own, from its weights by weights={}@last",
    ),
    "a cosine to nothing": (("scheduler=cosine",), {"plan": 40}, ("epochs=9",), "where it ends (0, which trains nothi"),
    "by steps": (
        ("scheduler=one_cycle", "max_steps=25"),
        {"plan": 25},
        ("max_steps=30",),
        "max_steps=30: the schedule of {} is planned to the run's end, epochs=4 and max_steps=25, and one with another "
        "end has had other learning rates until here; keep its plan by scheduler.epochs=2.5, after which the learning",
    ),
    "no longer by steps": (
        ("scheduler=cosine", "max_steps=25"), {"plan": 25}, ("max_steps=null",), "max_steps=null: the schedule of "
    ),
    "beyond the plan": (("scheduler=cosine",), {"plan": 40}, ("epochs=9", "scheduler.epochs=4"), ""),
    "beyond the plan, by steps": (
        ("scheduler=one_cycle", "max_steps=25"), {"plan": 25}, ("max_steps=30", "scheduler.epochs=2.5"), ""
    ),
    "within the plan": (("scheduler=cosine", "scheduler.epochs=9"), {"plan": 90}, ("epochs=9",), ""),
    "another plan": (
        ("scheduler=cosine", "scheduler.epochs=9"),
        {"plan": 90},
        ("scheduler.epochs=8",),
        "scheduler.epochs=8: the schedule of {} is planned to the end of scheduler.epochs=9, and",
    ),
    "an older version's": (("scheduler=cosine",), {"steps_per_epoch": None}, ("epochs=9",), "keep its plan by sche"),
    "an older version's, with its plan": (
        ("scheduler=cosine",), {"steps_per_epoch": None}, ("epochs=9", "scheduler.epochs=4"), ""
    ),
    "own, told its end": (
        (*OWN, "+scheduler.max_lr=1"),
        {"plan": 4},
        ("epochs=9",),
        "epochs=9: the schedule of {} is planned to the run's end, epochs=4, and one with another end has had other "
        "learning rates until here; keep its plan by +scheduler.total_steps=4, or begin",
    ),
    "own, told its end, which stays": (
        (*OWN, "+scheduler.max_lr=1"), {"plan": 4}, ("epochs=9", "+scheduler.total_steps=4"), ""
    ),
    "own, with an end": ((*OWN, "+scheduler.max_lr=1", "+scheduler.total_steps=9"), {"plan": 9}, ("epochs=9",), ""),
    "own, with another end": (
        (*OWN, "+scheduler.max_lr=1", "+scheduler.total_steps=9"),
        {"plan": 9},
        ("++scheduler.total_steps=8",),
        "scheduler.total_steps=8: the schedule of {} is planned to the end of scheduler.total_steps=9, and",
    ),
    "own, without one": ((*OWN, "+scheduler.max_lr=1"), {"plan": None}, ("epochs=9",), ""),
    "own, which gets one": (
        (*OWN, "+scheduler.max_lr=1"),
        {"plan": None},
        ("+scheduler.total_steps=8",),
        "scheduler.total_steps=8: the checkpoint {}/checkpoints/last.pt is of a run with null; give that",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_a_schedule_that_is_planned_to_the_runs_end_is_told_of_first(
    name: str, configured: Configured, tmp_path: Path
) -> None:
    words, of_plan, more, says = PLANS[name]
    paths, config = RunPaths(tmp_path / "run"), configured(*words, "epochs=4")
    saved = {"steps_per_epoch": 10, **of_plan}
    if saved["steps_per_epoch"] is None:
        del saved["steps_per_epoch"]
    checkpoint.save(paths.last, state(config, 20, best=1, **saved))
    asked = configured(*words, "epochs=4", *more)
    if not says:
        assert resume.find(asked, Content(), paths, may_have_run=True) == paths.last
        return
    with pytest.raises(ConfigError) as refused:
        resume.find(asked, Content(), paths, may_have_run=True)
    assert says.replace("{}", str(paths.folder)) in str(refused.value)
    assert "\n" not in str(refused.value)


def of_source(code: str, paths: RunPaths, status: str = "completed") -> None:
    create_result(paths, may_exist=True, content={"data": None, "code": code}, steps_per_epoch=2)
    update_result(paths, status=status)


@pytest.mark.parametrize(
    ("status", "says"),
    [
        ("completed", "the run is complete, and its own classes .*; to train .* rerun {}"),
        (
            "failed",
            (
                "trained to its end, but not tested, and its own .*; to test it: .* evaluate {}; to"
                " train"
            ),
        ),
    ],
)
@pytest.mark.parametrize("new_folder", [False, True])
def test_a_run_that_is_trained_is_not_tested_by_other_source(
    config: RunConfig, paths: RunPaths, tmp_path: Path, new_folder: bool, status: str, says: str
) -> None:
    of_source("then", paths, status)
    config = dataclasses.replace(config, resume=str(paths.folder) if new_folder else "auto")
    where = RunPaths(tmp_path / "new") if new_folder else paths
    checkpoint.save(
        paths.last, state(config, 4, best=1, position={"epoch": 2, "step": 4, "step_in_epoch": 2})
    )
    for epochs, max_steps in ((2, None), (3, 4)):
        asked = dataclasses.replace(config, epochs=epochs, max_steps=max_steps)
        with pytest.raises(ConfigError, match=says.format(paths.folder)):
            resume.find(asked, Content(code="now"), where, may_have_run=not new_folder)


def test_a_run_goes_on_with_other_source_in_a_new_folder_alone(
    config: RunConfig, paths: RunPaths, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    of_source("then", paths)
    config = dataclasses.replace(config, epochs=2)  # step 3 is in the second, and not its last
    assert resume.find(config, Content(code="then"), paths, may_have_run=True) == paths.last
    with pytest.raises(
        ConfigError, match=f"in a new folder, type its settings with resume={paths.folder} and"
    ):
        resume.find(config, Content(code="now"), paths, may_have_run=True)
    config = dataclasses.replace(config, resume=str(paths.folder))
    assert (
        resume.find(config, Content(code="now"), RunPaths(tmp_path / "new"), may_have_run=False)
        == paths.last
    )
    assert "other source now; what goes on from it is of both" in capsys.readouterr().err
