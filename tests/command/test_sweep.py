"""A grid and its folder: which runs there are, what an earlier command left, what is refused."""

import dataclasses
import shutil
from pathlib import Path

import pytest

from expt.command.grammar import as_dict, last_of_each
from expt.command.sweep import Grid
from expt.command.sweep_folder import SweepFolder, SweepRun
from expt.config.identity import Identity, shown
from expt.errors import ConfigError
from expt.launch.job import QUEUED
from expt.machine import Machine
from expt.runs.paths import RunPaths
from expt.runs.result import COMPLETED, Objective, create_result, update_result
from tests.composing import composer
from tests.conftest import Typed
from tests.facade import Capture

HERE = Machine(gpus=(), cpus=2)


def runs(folder: Path, *words: str, first: int = 0) -> list[SweepRun]:
    """Return the runs of a grid in a folder, as a new command finds them."""
    grid, known = Grid(words, composer()), SweepFolder(folder, composer(), HERE)
    return [known.run(each, number, grid.keys) for number, each in enumerate(grid, first)]


def complete(run: SweepRun, value: float) -> None:
    request = run.job.asked
    create_result(run.job.paths, identity=request.identity.digest, arguments=run.words)
    objective = Objective(name="accuracy/val", value=value)
    update_result(run.job.paths, status=COMPLETED, objective=objective)
    run.job.paths.metrics.touch()


def test_a_grid_is_the_product_of_its_axes_and_the_last_varies_first() -> None:
    grid = Grid(["model=mlp,convnet", "epochs=2", "seed=range(2)"], composer())
    assert (len(grid), grid.keys) == (4, ["model", "seed"])
    assert [*grid][1] == ["model=mlp", "epochs=2", "seed=1"]
    assert len(Grid([*map("seed=range({})".format, (3,)), "model=glob([m*,c*])"], composer())) == 6
    assert [*Grid(["seed=1"], composer())] == [["seed=1"]]


def test_of_several_words_for_a_key_the_last_counts() -> None:
    words = ["seed=0", "model=mlp", "+own.width=1", "seed=1,2", "own.width=3", "~ema", "ema=0.9"]
    found = [str(each.input_line) for each in last_of_each(words)]
    assert found == ["model=mlp", "seed=1,2", "+own.width=3", "~ema", "ema=0.9"]
    assert [each.input_line for each in last_of_each(["+a=1", "++a=2"])] == ["++a=2"]
    whole = ["++own.size.0=5", "own.size=[1,2]"]  # the + of an element is none of the list's
    assert [each.input_line for each in last_of_each(whole)] == ["own.size=[1,2]"]
    expected = {"optimizer.lr": 1e-3, "x.y": None, "aug@model.opts": "a", "n": "a b"}
    assert as_dict(["optimizer.lr=1e-3", "~x.y", "aug@model.opts=a", "+n='a b'"]) == expected


@pytest.mark.parametrize(
    ("words", "problems"),
    [
        (["optimizer.lr=0.1,abc,-1", "seed=0,-1"], ["optimizer.lr=abc", "optimizer.lr=-1",
            "seed=-1"]),
        (["model.hidden=[4],[4,x]"], ["model.hidden=[4,x]"]),
        (["seed=0,1", "gpus=0,x"], ["gpus=x"]),
        (["model=mlp,mpl"], ["model=mpl"]),
        (["tensorboard={images: false},{images: 3}"], ["tensorboard.images=3"]),
        (["sede=1,2"], ["sede=1"]),
        (["model=mlp,convnet", "modle.x=1"], ["modle.x=1"]),
        (["experiment=ddp_mlp,nope"], ["experiment=nope"]),
    ],
)  # fmt: skip
def test_value_no_run_can_have_is_refused_first(words: list[str], problems: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        Grid(words, composer()).check(HERE)
    told = [problem.split(":")[0] for problem in caught.value.problems]
    assert told == [each.split(":")[0] for each in problems]


@pytest.mark.parametrize(
    "words",
    [
        ["batch_size=64,63", "world_size=2"],
        ["gpus=0,4"],
        ["batch_size=64,'32 per worker'", "world_size=auto,2"],
        ["model=mlp,convnet", "model.dropout=0.1,0.2"],
        ["experiment=ddp_mlp,d2l_resnet18", "seed=1,2"],
        ["tensorboard={images: false},{norms: false}"],
        ["model=mlp,{_target_: mine.Net}"],
        ["model=convnet,mlp", "eval_batch_size=32,${model.hidden.0}"],
        ["batch_size=32,64", "eval_batch_size=32,${batch_size}"],
        ["optimizer.lr=0.1,${optimizer.momentum}"],
        ["+mlflow.tags.place=${hydra:runtime.output_dir},here"],
        ["mlflow.experiment=${hydra:runtime.output_dir},here"],
    ],
)
def test_what_only_some_runs_cannot_have_is_left_to_them(words: list[str]) -> None:
    Grid(words, composer()).check(HERE)


@pytest.mark.parametrize("word", ["model=glob(zz*)", "optimizer.lr=glob(*)", "seed=range(3,3)"])
def test_an_axis_has_values(word: str) -> None:
    with pytest.raises(ConfigError, match="has no value"):
        Grid([word], composer())
    with pytest.raises(ConfigError, match="search=tpe"):
        Grid(["optimizer.lr=interval(0,1)"], composer())


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("seed=range(0,2),7", ["0", "1", "7"]),
        ("seed=9,choice(1,2),range(4,8,2)", ["9", "1", "2", "4", "6"]),
        ("model.dropout=range(0,0.2,0.1),0.5", ["0.0", "0.1", "0.5"]),
        ("model.dropout=range(0.7,0.9,0.1)", ["0.7", "0.8"]),
        ("model.dropout=range(0.9,0.6,-0.1)", ["0.9", "0.8", "0.7"]),
    ],
)
def test_a_range_has_the_numbers_that_are_typed_and_may_be_one_of_several_values(
    word: str, values: list[str]
) -> None:
    key = word.partition("=")[0]
    assert [*Grid([word], composer())] == [[f"{key}={value}"] for value in values]
    with pytest.raises(ConfigError, match="an axis by itself"):
        Grid(["model.dropout=interval(0,1),5"], composer())
    with pytest.raises(ConfigError, match="step other than 0"):
        Grid(["seed=range(0,3,0)"], composer())


def test_each_run_is_in_a_folder_that_says_what_differs(tmp_path: Path) -> None:
    first, second = runs(tmp_path, "seed=0,1", "epochs=2", first=5)
    folders = [run.job.paths.folder.name for run in (first, second)]
    assert folders == ["seed=0", "seed=1"]
    composed = second.configuration()
    assert composed.hydra.job.num == 6
    assert composed.hydra.runtime.output_dir == str(tmp_path / "seed=1")
    config = second.job.asked.config
    assert (config.seed, config.epochs, config.threads) == (1, 2, 1), "a worker has one thread"
    assert second.about["overrides"] == {"seed": 1, "epochs": 2}
    assert not any(tmp_path.iterdir()), "nothing is written before a run's turn comes"
    second.save_hydra_files()
    assert second.job.paths.overrides.read_text() == "- seed=1\n- epochs=2\n"


def test_a_value_may_be_of_hydras_own_part(tmp_path: Path) -> None:
    about = "mlflow.experiment='${hydra:job.num} ${hydra:runtime.output_dir}'"
    found = [run.job.asked.config for run in runs(tmp_path, "seed=0,1", about)]
    expected = [f"{number} {tmp_path}/seed={number}" for number in (0, 1)]
    assert [config.trackers["mlflow"].experiment for config in found] == expected


def test_a_run_that_cannot_be_composed_is_refused_by_itself(tmp_path: Path) -> None:
    refused, run = runs(tmp_path, "tensorboard={imagez: true},{images: false}")
    assert isinstance(refused.job.error, ConfigError)
    assert (refused.job.request, run.job.error) == (None, None)


def test_a_run_named_twice_is_one(tmp_path: Path) -> None:
    first, second, other = runs(tmp_path, "epochs=10,10,2")
    assert first.job is second.job
    assert other.job is not first.job


def test_what_is_complete_is_known_whatever_it_was_called(tmp_path: Path) -> None:
    (run,) = runs(tmp_path, "seed=0")
    complete(run, 0.75)
    same, new = runs(tmp_path, "epochs=10,2")
    assert (same.job.status, same.job.paths) == (COMPLETED, run.job.paths)
    assert same.job.objective is not None
    assert same.job.objective["value"] == 0.75
    assert (new.job.status, new.job.paths.folder) == (QUEUED, tmp_path / "epochs=2")


def test_of_runs_that_resume_one_the_same_one_further_is_that_run(tmp_path: Path) -> None:
    """Each by its own settings, though all have the same data and code."""
    (first,) = runs(tmp_path / "first", "seed=0")
    known = first.job.asked
    config = shown(known.config)
    digest, content = known.identity.digest, known.identity.content
    create_result(first.job.paths, identity=digest, content=content, config=config)
    words = (f"resume='{first.job.paths.folder}'", "epochs=20", "seed=1,0")
    other, same = (run.job.asked for run in runs(tmp_path / "sweep", *words))
    for asked, is_same in ((other, False), (same, True)):
        in_one_go = dataclasses.replace(asked.config, resume=None)
        assert (asked.identity == Identity.of(in_one_go, content)) == is_same


@pytest.mark.parametrize("copy", ["a backup", "z backup"])
def test_a_run_is_known_under_its_own_name_and_not_as_its_copy(tmp_path: Path, copy: str) -> None:
    (run,) = runs(tmp_path, "seed=range(1)")
    complete(run, 0.75)
    update_result(run.job.paths, name="seed=0")
    shutil.copytree(tmp_path / "seed=0", tmp_path / copy)
    assert runs(tmp_path, "seed=0")[0].job.paths == run.job.paths
    shutil.rmtree(tmp_path / "seed=0")
    assert runs(tmp_path, "seed=0")[0].job.paths.folder == tmp_path / copy


def test_a_folder_of_another_run_is_left_to_it(tmp_path: Path, capsys: Capture) -> None:
    create_result(RunPaths(tmp_path / "seed=0"), identity="other", arguments=["epochs=3"])
    (run,) = runs(tmp_path, "seed=range(1)")
    key = run.job.asked.identity.digest
    assert run.job.paths.folder == tmp_path / f"seed=0,{key}"
    (tmp_path / "seed=0/result.json").write_text("{")
    assert runs(tmp_path, "seed=range(1)")[0].job.paths.folder == tmp_path / f"seed=0,{key}"
    assert "is damaged" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name",
    ["checkpoints/best-mine.safetensors", "code/a.py", "metrics.jsonl", ".hydra/config.yaml"],
)
def test_a_folder_that_holds_files_by_a_runs_names_is_left(tmp_path: Path, name: str) -> None:
    (theirs := tmp_path / "seed=1" / name).parent.mkdir(parents=True)
    theirs.touch()
    found = [run.job.paths.folder.name for run in runs(tmp_path, "seed=0,1")]
    assert (found[0], found[1].partition(",")[0]) == ("seed=0", "seed=1")
    assert found[1] != "seed=1"


def test_a_folder_of_a_run_that_was_killed_at_its_start_is_its_own(tmp_path: Path) -> None:
    (begun := RunPaths(tmp_path / "seed=1")).hydra.mkdir(parents=True)
    begun.lock.touch()
    assert [run.job.paths.folder.name for run in runs(tmp_path, "seed=0,1")][1] == "seed=1"


@pytest.mark.parametrize(
    "files",
    [
        *({name: "{}"} for name in ("summary.csv", "summary.md", "grid.json")),
        {"multirun.yaml": "hydra:\n  job:\n    name: train\n", "summary.csv": "mine\n"},
    ],
)
def test_a_sweep_begins_in_no_folder_that_holds_files_by_its_names(
    tmp_path: Path, files: dict[str, str], typed: Typed
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    done = typed("-m", "seed=0,1", "hydra.sweep.dir=.")
    assert (done.returncode, "hydra.sweep.dir" in done.stderr) == (2, True)
    assert len(files) > 1 or f"{name}: no record" in done.stderr
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == files


def test_a_sweep_replaces_no_link_whose_target_is_missing(tmp_path: Path, typed: Typed) -> None:
    for name in ("multirun.yaml", "grid.json"):
        (link := tmp_path / name).symlink_to("unmounted")
        done = typed("-m", "seed=0,1", "hydra.sweep.dir=.")
        assert (done.returncode, f"{name}: no record" in done.stderr) == (2, True)
        assert [*tmp_path.iterdir()] == [link]
        link.unlink()


@pytest.mark.parametrize("words", ["hydra.run.dir=.", "-m seed=0,1 hydra.sweep.dir=."])
def test_a_refused_command_leaves_a_lock_of_another_program(
    tmp_path: Path, words: str, typed: Typed
) -> None:
    (tmp_path / ".lock").write_text("theirs")
    done = typed(*words.split(), "dataset=mnist", "dataset.root=nowhere")
    assert done.returncode == 2
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(".lock", "theirs")]
