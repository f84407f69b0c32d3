"""How a run begins: its checkpoint, the best that comes with it, and allowed changes."""

import dataclasses
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from expt.config.constraints import Target
from expt.config.identity import VERSION
from expt.config.schema import EarlyStop, RunConfig
from expt.errors import CheckpointError, ConfigError
from expt.runs import checkpoint, checkpoint_file, lineage
from expt.runs.paths import RunPaths
from expt.runs.result import create_result, update_result
from tests.conftest import Configured
from tests.facade import Capture, as_typed, checkpoint_state, continued, resumed


def state(config: RunConfig, step: int, best: int | None, **more: Any) -> dict[str, Any]:
    """What a checkpoint says after `step` steps, when the best was reached at another."""
    reached = best and {"metric": "loss/val", "value": 1 / best, "epoch": best, "step": best}
    known = {
        "position": {"epoch": 1, "step": step, "step_in_epoch": 0},
        "steps_per_epoch": 10,
        "metrics_bytes": 10 * step,
        "best": reached,
        "bests": [reached] if reached else [],
        "evaluated": reached if best == step else None,
    }
    return checkpoint_state(config, step, **{**known, **more})


@pytest.fixture
def config(configured: Configured) -> RunConfig:
    return configured()


@pytest.fixture
def paths(tmp_path: Path, config: RunConfig) -> RunPaths:
    """A run whose last checkpoint is of step 3, the one before of step 2, the best of step 1."""
    paths = RunPaths(tmp_path / "run")
    paths.folder.mkdir()
    for step in (1, 2, 3):
        checkpoint.save(paths.last, state(config, step, best=1), keep=1)
        if step == 1:
            checkpoint_file.keep_as(paths.last, paths.best)
    paths.metrics.write_text("123456789\n" * 5)
    return paths


def step_of(path: Path | None) -> int:
    assert path is not None
    step: int = checkpoint.load(path)["position"]["step"]
    return step


def test_the_newest_whole_one_is_found(config: RunConfig, paths: RunPaths, capsys: Capture) -> None:
    assert continued(config, paths) == paths.last
    paths.last.write_bytes(b"damaged")
    found = continued(config, paths)
    assert step_of(found) == 2
    assert found is not None
    found.write_bytes(b"damaged too")
    for _ in range(2):
        with pytest.raises(CheckpointError, match=f"{paths.checkpoints}: every checkpoint there"):
            continued(config, paths)
    shutil.rmtree(paths.checkpoints)
    assert continued(config, paths) is None
    assert f"{paths.folder}: has no checkpoint" in capsys.readouterr().err


def test_a_new_run_looks_for_none(config: RunConfig, paths: RunPaths) -> None:
    assert continued(config, paths, resumes=False) is None


def test_what_no_run_has_left_is_not_set_aside(config: RunConfig, tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.checkpoints.mkdir()
    paths.last.write_text("of another program")
    with pytest.raises(ConfigError, match=r"no result\.json says that a run is there"):
        continued(config, paths)
    assert [path.name for path in paths.checkpoints.iterdir()] == ["last.safetensors"]


def test_a_run_of_another_version_is_not_continued(config: RunConfig, paths: RunPaths) -> None:
    for version in (VERSION + 1, None):
        checkpoint.save(paths.last, state(config, 3, best=1, version=version))
        with pytest.raises(ConfigError, match=r"last\.safetensors: is of another version of expt"):
            continued(config, paths)


def test_damaged_best_is_not_tested(config: RunConfig, paths: RunPaths, capsys: Capture) -> None:
    content = bytearray(paths.best.read_bytes())
    content[len(content) // 2] ^= 1
    paths.best.unlink()
    paths.best.write_bytes(content)
    continued(config, paths)
    assert "set aside as" in capsys.readouterr().err
    assert not paths.best.exists()
    checkpoint.save(paths.best, {"weight": 1.0})
    continued(config, paths)
    assert not paths.best.exists(), "a state_dict is none either"


def test_missing_best_is_found_in_older_checkpoints(config: RunConfig, paths: RunPaths) -> None:
    for step in (4, 5):  # of the second `best` is what it knows of
        checkpoint.save(paths.last, state(config, step, best=4), keep=1)
    continued(config, paths)
    assert step_of(paths.best) == 4


def test_a_checkpoint_that_is_the_best_becomes_it(config: RunConfig, paths: RunPaths) -> None:
    checkpoint.save(paths.last, state(config, 4, best=4))  # and then it was killed
    continued(config, paths)
    assert step_of(paths.best) == 4


def test_a_best_of_later_is_not_taken_for_that_of_then(
    config: RunConfig, paths: RunPaths, tmp_path: Path, capsys: Capture
) -> None:
    checkpoint.save(paths.best, state(config, 5, best=5))
    resumed(paths.last, tmp_path / "new")
    assert "is not the best checkpoint that last.safetensors recorded" in capsys.readouterr().err
    assert not RunPaths(tmp_path / "new").best.exists()


@pytest.mark.parametrize(
    ("which", "step"),
    [("", 3), ("@last", 3), ("@2", 2), ("@best", 1), ("/checkpoints/last-1.safetensors", 2)],
)
def test_resume_names_a_checkpoint_as_fork_does(
    which: str, step: int, config: RunConfig, paths: RunPaths, tmp_path: Path
) -> None:
    asked = dataclasses.replace(config, resume=f"{paths.folder}{which}")
    new = RunPaths(tmp_path / "new")
    assert continued(asked, new, resumes=False) == new.last
    assert step_of(new.last) == step


OTHER: dict[str, Any] = {
    "seed": 1, "batch_size": 128, "label_smoothing": 0.1, "gradient_clip": 1.0, "drop_last": False,
    "eval_split": "test", "objective": "loss/val", "amp": "bf16", "lr_scaling": "linear",
}  # fmt: skip
SAME: dict[str, Any] = {
    "epochs": 20, "max_steps": 5, "log_every": 3, "world_size": 2, "gradient_accumulation": 2,
    "timeout_s": 5.0,
    "max_restarts": 3, "threads": 2, "profile": True, "compile": True, "on_nan": "skip",
    "early_stop": EarlyStop(metric="loss/val", patience=3),
    "callbacks": (Target(target="mine.Watch", kwargs={}),),
}  # fmt: skip


@pytest.mark.parametrize("key", OTHER)
def test_what_is_trained_may_not_change(key: str, config: RunConfig, paths: RunPaths) -> None:
    with pytest.raises(ConfigError, match=f"{key}=.*: .* has .*a resume must keep"):
        continued(dataclasses.replace(config, **{key: OTHER[key]}), paths)


@pytest.mark.parametrize("key", SAME)
def test_how_it_is_trained_may(key: str, config: RunConfig, paths: RunPaths) -> None:
    assert continued(dataclasses.replace(config, **{key: SAME[key]}), paths) == paths.last


@pytest.mark.parametrize(
    "word",
    ["optimizer.lr=0.1", "scheduler=cosine", "model.hidden=[32]", "dataset.val_fraction=0.2"],
)
def test_nor_may_a_groups_settings(word: str, configured: Configured, paths: RunPaths) -> None:
    with pytest.raises(ConfigError, match=word.partition("=")[0]) as refused:
        continued(configured(word), paths)
    is_fork_s = word.startswith(("optimizer", "scheduler"))  # and a fork keeps the others
    end = f" by fork={paths.folder}@3 {word}" if is_fork_s else f" by weights={paths.folder}@last"
    assert str(refused.value).endswith(end)


@pytest.mark.parametrize("text", ["a,b", "null", "010", "it's", "${x}"])
def test_a_text_that_must_be_kept_can_be_typed(
    text: str, configured: Configured, tmp_path: Path
) -> None:
    config = configured("dataset=table", "dataset.path=a.csv", "dataset.targets=a", "model=mlp")
    paths = RunPaths(tmp_path / "run")
    paths.folder.mkdir()
    checkpoint.save(paths.last, state(config, 3, best=None))
    other = dataclasses.replace(config.dataset, targets=text)
    with pytest.raises(ConfigError, match=r"dataset\.targets=") as refused:
        continued(dataclasses.replace(config, dataset=other), paths)
    (word,) = shlex.split(refused.value.problems[0].partition(": ")[0])
    assert OverridesParser.create().parse_override(word).value() == text


def test_a_fork_that_needs_more_epochs_is_advised_so(
    configured: Configured, paths: RunPaths
) -> None:
    with pytest.raises(ConfigError, match=rf"fork={paths.folder}@3 optimizer.lr=0.1 epochs=2$"):
        continued(configured("epochs=1", "optimizer.lr=0.1"), paths)
    with pytest.raises(ConfigError, match=rf"fork={paths.folder}@3 optimizer.lr=0.1 max_steps=4$"):
        continued(configured("max_steps=3", "optimizer.lr=0.1"), paths)
    with pytest.raises(ConfigError, match=rf"fork={paths.folder}@3 optimizer.lr=0.1 epochs=70$"):
        continued(configured("epochs=70", "optimizer.lr=0.1"), paths)


def test_advice_is_typed_into_a_shell(configured: Configured, paths: RunPaths) -> None:
    with pytest.raises(ConfigError) as refused:
        continued(configured("optimizer.groups=[{match: bias, weight_decay: 0.1}]"), paths)
    _, _, advice = str(refused.value).partition(" by ")
    assert " 'optimizer.groups=[{match:bias," in advice
    assert shlex.split(advice)[-1].endswith("}]")


def test_fork_of_a_file_without_its_run(config: RunConfig, paths: RunPaths, tmp_path: Path) -> None:
    content = {"no safetensors": b"PK\3\4", "no run": paths.last.read_bytes()}
    for word, begun in content.items():
        (tmp_path / "file").write_bytes(begun)
        with pytest.raises(ConfigError, match=rf"^fork=\S+file: .*{word}"):
            lineage.fork_parent(str(tmp_path / "file"))


def test_custom_class_as_typed(config: RunConfig, configured: Configured, paths: RunPaths) -> None:
    word = "model={_target_:torch.nn.LazyLinear,out_features:10}"
    checkpoint.save(paths.last, state(configured(word), 10, best=1))
    with pytest.raises(ConfigError) as refused:
        continued(config, paths)
    assert f"has '{word}', and a resume must keep" in str(refused.value)


@pytest.mark.parametrize(("key", "value", "done"), [("epochs", 2, 3), ("max_steps", 40, 50)])
def test_a_run_is_not_made_shorter_than_it_is(
    key: str, value: int, done: int, config: RunConfig, paths: RunPaths
) -> None:
    position = {"epoch": 3, "step": 50, "step_in_epoch": 10}
    checkpoint.save(paths.last, state(config, 50, best=1, position=position))
    for enough in (value + 10, 50):
        assert continued(dataclasses.replace(config, **{key: enough}), paths)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"{key}={value}: .* give {key}={done} or more"):
        continued(dataclasses.replace(config, **{key: value}), paths)  # type: ignore[arg-type]


OWN = (
    "~scheduler.warmup_epochs",
    *as_typed("+scheduler._target_=torch.optim.lr_scheduler.OneCycleLR +scheduler.max_lr=1"),
)
PLANS: dict[str, tuple[tuple[str, ...], int | None, tuple[str, ...], str]] = {
    # of a run of epochs=4, 10 steps an epoch: its schedule, the checkpoint's plan, what is asked,
    # the key that is refused and what keeps the plan
    "constant": (("scheduler=constant",), None, ("epochs=9",), ""),
    "step": (("scheduler=step",), None, ("epochs=9",), ""),
    "plateau": (("scheduler=plateau",), None, ("epochs=9",), ""),
    "the same end": (("scheduler=cosine",), 40, ("epochs=4",), ""),
    "cosine": (("scheduler=cosine",), 40, ("epochs=9",), "epochs=9: .* scheduler.epochs=4,"),
    "by steps": (
        ("scheduler=one_cycle", "max_steps=25"), 25, ("max_steps=30",),
        "max_steps=30: .* scheduler.epochs=2.5,"
    ),
    "no longer by steps": (("scheduler=cosine", "max_steps=25"), 25, ("max_steps=null",),
        "max_steps=null: "),
    "beyond the plan": (("scheduler=cosine",), 40, ("epochs=9", "scheduler.epochs=4"), ""),
    "beyond the plan, by steps": (
        ("scheduler=one_cycle", "max_steps=25"), 25, ("max_steps=30", "scheduler.epochs=2.5"), ""
    ),
    "within the plan": (("scheduler=cosine", "scheduler.epochs=9"), 90, ("epochs=9",), ""),
    "another plan": (
        ("scheduler=cosine", "scheduler.epochs=9"), 90, ("scheduler.epochs=8",),
        "scheduler.epochs=8.*: .* step 90; "
    ),
    "own, told its end": (OWN, 4, ("epochs=9",), r"epochs=9: .* \+scheduler.total_steps=4,"),
    "own, told its end, which stays": (OWN, 4, ("epochs=9", "+scheduler.total_steps=4"), ""),
    "own, with an end": ((*OWN, "+scheduler.total_steps=9"), 9, ("epochs=9",), ""),
    "own, with another end": (
        (*OWN, "+scheduler.total_steps=9"), 9, ("++scheduler.total_steps=8",),
        "scheduler.total_steps=8: "
    ),
    "own, without one": (OWN, None, ("epochs=9",), ""),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_other_end_of_schedule_refused(name: str, configured: Configured, tmp_path: Path) -> None:
    words, plan, more, says = PLANS[name]
    paths, config = RunPaths(tmp_path / "run"), configured(*words, "epochs=4")
    paths.folder.mkdir()
    checkpoint.save(paths.last, state(config, 20, best=None, plan=plan))
    asked = configured(*words, "epochs=4", *more)
    if not says:
        assert continued(asked, paths) == paths.last
        return
    with pytest.raises(ConfigError, match=f"^{says}.* weights=.*@last"):
        continued(asked, paths)


def of_source(code: str, paths: RunPaths, status: str = "completed") -> None:
    create_result(paths, may_exist=True, content={"data": None, "code": code}, steps_per_epoch=2)
    update_result(paths, status=status)


@pytest.mark.parametrize("new_folder", [False, True])
def test_a_run_that_is_trained_is_not_tested_by_other_source(
    config: RunConfig, paths: RunPaths, tmp_path: Path, new_folder: bool
) -> None:
    of_source("then", paths)
    config = dataclasses.replace(config, resume=str(paths.folder) if new_folder else "auto")
    where = RunPaths(tmp_path / "new") if new_folder else paths
    position = {"epoch": 2, "step": 4, "step_in_epoch": 2}
    checkpoint.save(paths.last, state(config, 4, best=1, position=position, steps_per_epoch=2))
    for epochs, max_steps in ((2, None), (3, 4)):
        asked = dataclasses.replace(config, epochs=epochs, max_steps=max_steps)
        with pytest.raises(ConfigError, match=f"evaluate {paths.folder}, .*rerun {paths.folder}"):
            continued(asked, where, content={"code": "now"}, resumes=not new_folder)


def test_one_whose_last_evaluation_failed_is_evaluated_by_other_source(
    config: RunConfig, paths: RunPaths, tmp_path: Path, capsys: Capture
) -> None:
    of_source("then", paths)
    position = {"epoch": 2, "step": 4, "step_in_epoch": 2}
    before = state(config, 4, best=1, position=position, steps_per_epoch=2, evaluated_at=2)
    checkpoint.save(paths.last, before)
    config = dataclasses.replace(config, epochs=2, resume=str(paths.folder))
    with pytest.raises(ConfigError, match=f"resume={paths.folder} .*rerun {paths.folder}"):
        continued(config, paths, content={"code": "now"})
    new = RunPaths(tmp_path / "new")
    assert continued(config, new, content={"code": "now"}, resumes=False) == new.last
    assert "source of its custom classes has changed" in capsys.readouterr().err


def test_no_fork_begins_before_an_evaluation(
    config: RunConfig, paths: RunPaths, tmp_path: Path
) -> None:
    """Its parent's schedule would lack it."""
    checkpoint.save(paths.last, state(config, 3, best=1, owed=["evaluate"]))
    of_source("then", paths)
    config = dataclasses.replace(config, fork=str(paths.folder))
    with pytest.raises(ConfigError, match=rf"^fork=\S+: .*weights={paths.folder}@last"):
        continued(config, RunPaths(tmp_path / "new"), resumes=False)


def test_a_run_goes_on_with_other_source_in_a_new_folder_only(
    config: RunConfig, paths: RunPaths, tmp_path: Path, capsys: Capture
) -> None:
    of_source("then", paths)
    assert continued(config, paths, content={"code": "then"}) == paths.last
    with pytest.raises(ConfigError, match=f"resume={paths.folder} .*rerun {paths.folder}"):
        continued(config, paths, content={"code": "now"})
    config = dataclasses.replace(config, resume=str(paths.folder))
    new = RunPaths(tmp_path / "new")
    assert continued(config, new, content={"code": "now"}, resumes=False) == new.last
    assert "custom classes has changed" in capsys.readouterr().err


def test_other_data_is_refused(config: RunConfig, paths: RunPaths) -> None:
    create_result(paths, content={"data": "then", "code": None})
    with pytest.raises(ConfigError, match=r"^dataset: its files"):
        continued(config, paths, content={"data": "now"})
