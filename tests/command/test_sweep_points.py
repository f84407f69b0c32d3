"""The points of a grid: which run each is, in which folder, and what an earlier command left of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobStatus
from hydra.types import HydraContext, RunMode

from expt.command import parents, sweep_points
from expt.command.composed_run import ComposedRun
from expt.command.point_composer import PointComposer
from expt.command.sweep_points import Grid
from expt.config.identity import identity, shown
from expt.data.fingerprint import content_of
from expt.errors import ConfigError, RunFailed
from expt.launch.job import request_of
from expt.machine import Machine
from expt.runs.paths import RunPaths
from expt.runs.result import COMPLETED, Made, create_result, update_result
from expt.runs.sweep import results_of_sweep
from tests.composing import hydra_at_hand

HERE = Machine(gpus=(), cpus=2)
Composed = Callable[..., list[ComposedRun]]


@pytest.fixture
def composed(tmp_path: Path) -> Iterator[Composed]:
    """`composed([["seed=0"], ["seed=1"]], "seed=0,1")`: what a new Grid makes of the points of a
    command.
    """
    with hydra_at_hand():
        loader = GlobalHydra.instance().config_loader()

        def compose(
            points: Sequence[Sequence[str]], *words: str, first: int = 0
        ) -> list[ComposedRun]:
            asked = [f"hydra.sweep.dir='{tmp_path}'", *words]
            master = loader.load_configuration("config", asked, RunMode.MULTIRUN)
            composer = PointComposer(
                HydraContext(config_loader=loader, callbacks=Callbacks()), master
            )
            return list(Grid(tmp_path, HERE).compose(composer, master, points, first))

        yield compose


def complete(run: ComposedRun, value: float) -> None:
    config = request_of(run.job).config
    create_result(run.job.paths, identity=identity(config), arguments=run.overrides)
    update_result(
        run.job.paths, status=COMPLETED, objective={"name": "accuracy/val", "value": value}
    )
    run.job.paths.metrics.touch()


def test_each_point_is_a_run_in_a_folder_that_says_what_differs(
    tmp_path: Path, composed: Composed
) -> None:
    points = [["seed=0", "epochs=2"], ["seed=1", "epochs=2"]]
    first, second = composed(points, "seed=0,1", "epochs=2", first=5)
    assert [run.job.paths.folder for run in (first, second)] == [
        tmp_path / "seed=0",
        tmp_path / "seed=1",
    ]
    assert [run.hydra_config.hydra.job.num for run in (first, second)] == [5, 6]
    assert second.hydra_config.hydra.runtime.output_dir == str(tmp_path / "seed=1")
    config = request_of(second.job).config
    assert (config.seed, config.epochs, config.threads) == (
        1,
        2,
        1,
    ), "in a sweep a worker has one thread"
    assert second.about["overrides"] == {"seed": 1, "epochs": 2}
    assert (second.prepare_return().overrides, second.prepare_return().cfg["seed"]) == (
        points[1],
        1,
    )  # type: ignore[index]
    assert not any(tmp_path.iterdir()), "nothing is written before a run's turn comes"


def test_a_value_may_be_of_hydras_own_part_as_in_a_single_run(
    tmp_path: Path, composed: Composed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)
    about = (
        "mlflow.experiment='${hydra:job.config_name} ${hydra:job.num} ${hydra:runtime.output_dir}'"
    )
    runs = composed([["seed=0", about], ["seed=1", about]], "seed=0,1", about)
    found = [request_of(run.job).config.mlflow.experiment for run in runs]
    assert found == [f"config {number} {tmp_path}/seed={number}" for number in (0, 1)]


def test_a_point_that_cannot_be_composed_is_refused_by_itself(composed: Composed) -> None:
    refused, run = composed([["tensorboard={imagez:true}"], ["seed=1"]], "seed=0,1")
    assert isinstance(refused.job.error, ConfigError)
    assert "tensorboard.imagez" in str(refused.job.error)
    assert refused.hydra_config.hydra.runtime.output_dir == str(refused.job.paths.folder)
    assert refused.finish().status == JobStatus.FAILED
    assert (run.job.error, request_of(run.job).config.seed) == (None, 1)


def test_a_point_named_twice_is_one_run(composed: Composed) -> None:
    first, second, other = composed([["seed=0"], ["seed=0"], ["seed=0", "epochs=10"]], "seed=0,0")
    assert first.job is second.job
    assert other.job is first.job, "10 epochs are the default"


def test_what_is_complete_is_known_whatever_it_was_called(
    tmp_path: Path, composed: Composed
) -> None:
    (run,) = composed([["seed=0"]], "seed=0,1")
    complete(run, 0.75)
    same, new = composed([["seed=0", "epochs=10"], ["seed=0", "epochs=2"]], "epochs=10,2")
    assert (same.job.status, same.job.paths) == (COMPLETED, run.job.paths)
    assert (new.job.status, new.job.paths.folder) == ("queued", tmp_path / "epochs=2")
    returned = same.finish()
    assert (returned.status, returned.return_value) == (JobStatus.COMPLETED, 0.75)


@pytest.mark.parametrize("copy", ["a backup", "z backup"])
def test_a_run_is_known_under_its_own_name_and_not_as_its_copy(
    tmp_path: Path, composed: Composed, copy: str
) -> None:
    (run,) = composed([["seed=0"]], "seed=0,1")
    complete(run, 0.75)
    update_result(run.job.paths, name="seed=0")
    shutil.copytree(tmp_path / "seed=0", tmp_path / copy)
    (same,) = composed([["seed=0"]], "seed=0,1")
    assert same.job.paths == run.job.paths
    shutil.rmtree(tmp_path / "seed=0")
    (same,) = composed([["seed=0"]], "seed=0,1")
    assert same.job.paths.folder == tmp_path / copy, "where nothing else is left of it"


def test_where_the_data_is_missing_runs_are_known_by_their_settings_and_read_once(
    composed: Composed, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = [[f"seed={seed}", "label_smoothing=0.1"] for seed in range(3)]
    before = composed(points, "seed=0,1,2")
    for run in before[1:]:
        complete(run, 0.5)
        update_result(
            run.job.paths,
            config=shown(request_of(run.job).config),
            content={"data": "then", "code": None},
        )
    read = []

    def gone(config: object, **_: object) -> object:
        raise ConfigError("dataset.root=x: there is no such folder")

    def results(folder: Path) -> object:
        read.append(folder)
        return results_of_sweep(folder)

    monkeypatch.setattr(parents, "content_of", gone)
    monkeypatch.setattr(sweep_points, "results_of_sweep", results)
    found = composed(points, "seed=0,1,2")
    assert [run.job.status for run in found] == ["queued", COMPLETED, COMPLETED]
    assert [run.job.paths for run in found[1:]] == [run.job.paths for run in before[1:]]
    assert "no such folder" in str(found[0].job.error)
    assert len(read) == 2, "when the grid is opened, and for the first of them; not for each point"


def test_a_folder_of_another_run_is_left_to_it(
    tmp_path: Path, composed: Composed, capsys: pytest.CaptureFixture[str]
) -> None:
    create_result(
        RunPaths(tmp_path / "seed=0"),
        identity="of an older sweep",
        arguments=["seed=0", "epochs=3"],
    )
    (run,) = composed([["seed=0"]], "seed=0,1")
    assert run.job.paths.folder == tmp_path / f"seed=0,{identity(request_of(run.job).config)}"
    for text in ("{", "[1]"):
        (tmp_path / "seed=0" / "result.json").write_text(text)
        (run,) = composed([["seed=0"]], "seed=0,1")
        assert run.job.paths.folder.name.startswith("seed=0,"), "also where its record is damaged"
    assert (
        f"warning: {tmp_path}/seed=0/result.json: is damaged; what is there is"
        in capsys.readouterr().err
    )


def test_a_point_that_cannot_run_is_a_job_with_its_error(
    tmp_path: Path, composed: Composed
) -> None:
    bad, good = composed([["batch_size=63"], ["batch_size=64"]], "batch_size=63,64")
    assert (bad.job.request, good.job.error) == (None, None)
    assert "must divide by 2 workers" in str(bad.job.error)
    assert bad.finish().status == JobStatus.FAILED
    create_result(
        bad.job.paths, arguments=bad.overrides, error="it was refused by an earlier command"
    )
    update_result(bad.job.paths, status="failed")
    (again,) = composed([["batch_size=63", "world_size=1"]], "batch_size=63")
    assert again.job.paths.folder.name != "batch_size=63", "other words ask for another run"
    (refused,) = composed([["batch_size=63"]], "batch_size=63,64")
    assert refused.job.paths.folder == tmp_path / "batch_size=63"


def test_a_run_that_failed_is_nan_for_a_sweeper(composed: Composed) -> None:
    (run,) = composed([["seed=0"]], "seed=0,1")
    run.job.end(RunFailed("gone"), 1.0)
    returned = run.finish()
    assert returned.return_value != returned.return_value
    assert (returned.status, returned.overrides) == (JobStatus.FAILED, ["seed=0"])


def test_variables_for_the_workers_may_ask_for_the_run(composed: Composed) -> None:
    point = [
        "seed=7",
        "+hydra.job.env_set.WHERE=${hydra.sweep.subdir}",
        "+hydra.job.env_set.SEED=${seed}",
    ]
    (run,) = composed([point], "seed=7,8")
    assert request_of(run.job).env == {"WHERE": run.job.name, "SEED": "7"}


def test_a_point_that_was_refused_and_can_run_now_takes_the_place_of_its_refusal(
    tmp_path: Path, composed: Composed
) -> None:
    refusal = RunPaths(tmp_path / "refused then")
    create_result(refusal, arguments=["seed=0"], error="a GPU was missing")
    (run,) = composed([["seed=0"]], "seed=0,1")
    assert (run.job.paths, run.job.error) == (refusal, None)


def test_what_is_complete_but_for_its_files_is_made_anew(
    tmp_path: Path, composed: Composed, capsys: pytest.CaptureFixture[str]
) -> None:
    (run,) = composed([["seed=0"]], "seed=0,1")
    complete(run, 0.75)
    run.job.paths.metrics.unlink()
    (same,) = composed([["seed=0"]], "seed=0,1")
    assert (same.job.status, same.job.paths) == ("queued", run.job.paths)
    assert "its metrics.jsonl is gone; the run is made anew" in capsys.readouterr().err


def test_a_record_that_does_not_say_what_it_is_of_is_of_no_point(
    tmp_path: Path, composed: Composed
) -> None:
    create_result(RunPaths(tmp_path / "seed=0"))
    (run,) = composed([["seed=0"]], "seed=0,1")
    assert run.job.paths.folder.name.startswith("seed=0,")


def test_a_sweep_whose_folder_is_another_grids_says_so(
    tmp_path: Path, composed: Composed, capsys: pytest.CaptureFixture[str]
) -> None:
    (run,) = composed([["seed=0"]], "seed=0,1")
    complete(run, 0.75)
    composed([["seed=1"], ["seed=0"]], "seed=1,0")
    composed([["seed=0", "epochs=10"], ["seed=0", "epochs=20"]], "epochs=10,20")
    assert not capsys.readouterr().err, "the same grid, and an extended one, in whatever words"
    composed([["optimizer.lr=0.1"], ["optimizer.lr=0.2"]], "optimizer.lr=0.1,0.2")
    told = (
        f"warning: hydra.sweep.dir={tmp_path}: the runs there are of another grid, none of the 2"
        " asked for; "
    )
    assert capsys.readouterr().err.startswith(told)


def test_a_grid_that_has_run_with_other_code_or_data_is_no_other(
    tmp_path: Path, composed: Composed, capsys: pytest.CaptureFixture[str]
) -> None:
    create_result(RunPaths(tmp_path / "seed=0"), identity="of other code", arguments=["seed=0"])
    composed([["seed=0"], ["seed=1"]], "seed=0,1")
    assert not capsys.readouterr().err


def test_first_weights_are_looked_at_for_each_point_and_known_as_an_older_version_knew_them(
    tmp_path: Path, composed: Composed
) -> None:
    for name in "ab":
        (tmp_path / f"{name}.pt").write_text(name)
    points = [[f"weights={tmp_path}/{name}.pt"] for name in "ab"]
    runs = composed(points, f"weights={tmp_path}/a.pt,{tmp_path}/b.pt")
    requests = [request_of(run.job) for run in runs]
    assert [each.content for each in requests] == [content_of(each.config) for each in requests]
    assert len({each.content.weights for each in requests}) == 2
    complete(runs[0], 0.5)
    by_paths = identity(requests[0].config, requests[0].content, by_paths=True)
    content: Made = {"data": None, "code": None, "weights": str(requests[0].content.weights)}
    update_result(runs[0].job.paths, identity=by_paths, content=content)
    assert [run.job.status for run in composed(points)] == [COMPLETED, "queued"]
