"""What is said at a sweep's end."""

import io
import pickle
import socket
from pathlib import Path
from typing import Any

import pytest

from expt.command.conclude import again, conclude
from expt.command.run import Outcome
from expt.errors import Diverged, SweepFailed
from expt.launch.job import Job
from expt.runs.found import FoundRun
from expt.runs.paths import RunPaths
from expt.runs.result import COMPLETED, FAILED, INTERRUPTED, PRUNED, update_result
from expt.runs.view import leaderboard
from expt.runs.view.text import Console, resume_command
from tests.facade import Capture, Patch
from tests.runs.test_leaderboard import leave_run


def concluded(folder: Path) -> list[str]:
    """The lines at the end of the sweep of `folder`."""
    out = io.StringIO()
    conclude(Console(file=out, width=200), folder)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_what_the_command_has_to_say_is_said_where_no_run_could_begin_too(tmp_path: Path) -> None:
    out = io.StringIO()
    conclude(
        Console(file=out),
        tmp_path,
        notes=["budget       1s is used up: 0 of 6 points, 6 not begun"],
    )
    assert out.getvalue() == "budget       1s is used up: 0 of 6 points, 6 not begun\n"


def test_what_all_runs_have_cost_together(tmp_path: Path) -> None:
    gpus = ["0", "1"]
    leave_run(tmp_path, "lr=1", 0.25, devices=gpus, device_s=5400.0, energy_j=7.2e6)
    leave_run(tmp_path, "lr=2", 0.25, devices=gpus, device_s=5400.0, energy_j=0.9e6)
    leave_run(tmp_path, "lr=3", status=FAILED, error="no such file")
    assert "GPU time     3.0 h of 2 runs, 2.25 kWh" in concluded(tmp_path)
    leave_run(tmp_path, "lr=4", 0.25, world_size=2, config={"threads": 3})
    leave_run(tmp_path, "lr=5", devices=gpus, device_s_before=1234 * 3600.0)  # under way once more
    lines = concluded(tmp_path)
    assert "GPU time     1,237.0 h of 3 runs, 2.25 kWh of 2 of them" in lines
    assert "core time    18.0 s of 1 run" in lines


def test_pruned_runs_are_counted_and_the_best_named(tmp_path: Path) -> None:
    def pruned() -> list[str]:
        return [
            line
            for line in concluded(tmp_path / "s")
            if line.startswith(("pruned", "      to train"))
        ]

    leave_run(tmp_path / "s", "lr=0", 0.25)
    assert pruned() == []
    for name, value in (("lr=1", 0.5), ("lr=2", 0.75)):
        leave_run(tmp_path / "s", name, value)
        update_result(RunPaths(tmp_path / "s" / name), status=PRUNED)
    again = resume_command(RunPaths(tmp_path / "s/lr=2"))
    assert pruned() == ["pruned       2 of 3 runs", f"      to train the best to its end: {again}"]
    for name in ("lr=1", "lr=2"):
        update_result(RunPaths(tmp_path / "s" / name), resumable=False)
    assert pruned() == ["pruned       2 of 3 runs"]
    RunPaths(tmp_path / "s/lr=0").result.write_text("{")
    assert pruned() == ["pruned       2 of 2 runs"], "one that is damaged counts nowhere"


def test_a_sweep_without_a_run_is_not_concluded(tmp_path: Path) -> None:
    assert concluded(tmp_path) == []
    assert not any(tmp_path.iterdir())


def test_full_disk_hides_nothing(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    leave_run(tmp_path, "lr=1", 0.25)
    monkeypatch.setattr(leaderboard, "write_atomically", full)
    lines = concluded(tmp_path)
    assert lines[1].split()[:3] == ["1", "0.2500", COMPLETED]
    assert not any(line.startswith("summary") for line in lines), "for it is not there"
    assert (
        capsys.readouterr().err
        == f"warning: {tmp_path}: No space left on device; summary.csv and summary.md are not"
        " written\n"
    )


def test_a_run_without_a_process_is_lost(tmp_path: Path) -> None:
    leave_run(tmp_path, "lr=2", node=socket.gethostname())  # and says that it runs
    assert any(line.startswith("lost") for line in concluded(tmp_path))


@pytest.mark.parametrize(
    ("command", "arguments", "expected"),
    [
        ("python -m expt -m lr=1,2", ["lr=2"], "python -m expt lr=2"),
        ("expt --multirun lr=1,2 x=3", ["lr=2", "x=3"], "python -m expt lr=2 x=3"),
        ("python -m expt --config-dir my -m a=1,2", ["a=1"], "python -m expt --config-dir my a=1"),
        ("expt -m -cd a=b lr=1,2 --json", ["lr=1"], "python -m expt --config-dir a=b lr=1"),
        ("expt --config-dir='~/a b=$c' -m lr=1,2", ["lr=1"],
            "python -m expt --config-dir '~/a b=$c' lr=1"),
        ('expt -m -cd "it\'s"  lr=1,2 -q', ["lr=1"], """python -m expt --config-dir "it's" lr=1"""),
        ("expt rerun --json old", ["lr=1"], "python -m expt lr=1"),
        ("python -m expt -m 'n=a b,c'", ["n='a b'"], """python -m expt "n='a b'" """.strip()),
        ("python -m expt -m fork=s/lr=1@2", ["fork='s/lr=1@2'"],
         """python -m expt "fork='s/lr=1@2'\""""),
        ("python -m expt -m fork=a@epoch:1,b", ["fork=a@epoch\\:1"],
            "python -m expt 'fork=a@epoch\\:1'"),
        ("python -m expt -m fork=s/a=1,b=2@2", ["fork='s/a=1,b=2@2'"],
            """python -m expt "fork='s/a=1,b=2@2'\""""),
        ("python -m expt sweep=s epochs=2", ["sweep=s", "lr=1", "epochs=2"],
         "python -m expt sweep=s lr=1 epochs=2 hydra.mode=RUN"),
        ("python -m expt -m hydra/launcher=basic +m.w=1 ~m.h",
            ["+m.w=1", "~m.h"],
         "python -m expt +m.w=1 '~m.h'"),
        ("notebook.py --fast 3", ["lr=1"], "python -m expt lr=1"),
        ("python -m pytest --fast 3", ["lr=1"], "python -m expt lr=1"),
        ("expt -m lr=1,2 resume=auto", ["resume=auto", "lr=1"], "python -m expt lr=1"),
        ("expt -m a=1,2 resume='auto'", ["+resume='auto'", "a=1"], "python -m expt a=1"),
        ("expt -m lr=1,2 resume=a/last.safetensors", ["resume=a/last.safetensors", "lr=1"],
            "python -m expt resume=a/last.safetensors lr=1"),
    ],
)  # fmt: skip
def test_command_that_repeats_one_point(command: str, arguments: list[str], expected: str) -> None:
    run = FoundRun(Path("run"), {"command": command, "arguments": arguments})
    assert again(run) == expected


def test_a_run_of_a_notebooks_class_is_repeated_from_its_folder() -> None:
    config = {"model": {"name": "_target_", "target": "expt_main_0123456789ab.Net", "kwargs": {}}}
    record: Any = {"command": "x.py -m", "arguments": [], "config": config}
    assert (
        again(FoundRun(Path("sweep/model=Net"), record)) == "python -m expt rerun sweep/model=Net"
    )


def test_what_had_paused_and_went_on_counts_once() -> None:
    outcome, paths = Outcome(), RunPaths(Path("a"))
    for status in (PRUNED, PRUNED, COMPLETED):
        outcome.add(paths, status)
    assert outcome.ended == {paths: COMPLETED}


@pytest.mark.parametrize(
    ("others", "before", "failed"),
    [([PRUNED], [], 0), ([COMPLETED], [], 0), ([], [PRUNED], 0), ([], [], 1)],
)
def test_diverged_point_is_no_failure(others: list[str], before: list[str], failed: int) -> None:
    """Also in an earlier command."""
    outcome = Outcome()
    for status in before:
        outcome.add(RunPaths(Path("before")), status)
    diverged = Job(RunPaths(Path("bad")), None, FAILED, Diverged("the loss was nan"))
    outcome.add_jobs(
        [diverged, *(Job(RunPaths(Path(status)), None, status) for status in others)], (Diverged,)
    )
    assert list(outcome.ended.values()).count(FAILED) == failed


@pytest.mark.parametrize(
    ("statuses", "unseen", "said"),
    [
        ([COMPLETED, COMPLETED], 0, None),
        ([COMPLETED, INTERRUPTED], 4, None),
        ([COMPLETED, PRUNED], 0, None),
        ([COMPLETED, FAILED], 0, "1 of 2 runs failed"),
        ([PRUNED, FAILED, COMPLETED], 0, "1 of 3 runs failed"),
        ([FAILED, FAILED, COMPLETED, INTERRUPTED, "queued"], 6, "2 of 9 runs failed, 6 were"),
    ],
)
def test_a_command_fails_if_a_run_has(statuses: list[str], unseen: int, said: str | None) -> None:
    outcome = Outcome(num_unfinished=unseen)
    for number, status in enumerate(statuses):
        outcome.add(RunPaths(Path(str(number))), status)
    assert [*outcome.ended.values()] == [
        status for status in statuses if status in (COMPLETED, PRUNED, FAILED)
    ]
    if said is None:
        outcome.raise_if_failed()
        return
    with pytest.raises(SweepFailed) as raised:
        outcome.raise_if_failed()
    assert str(raised.value).startswith(said)
    assert vars(pickle.loads(pickle.dumps(raised.value))) == vars(raised.value), "once pickled"
    assert len(raised.value.completed) == statuses.count(COMPLETED)


def test_the_best_setting_is_trained_with_all_of_its_repetitions(tmp_path: Path) -> None:
    leave_run(tmp_path, "lr=2", 0.75, search={"number": 1})
    pairs = {(3, 1): 0.7, (10, 0): 0.8, (3, 0): 0.9, (10, 1): None}
    for (seed, fold), value in pairs.items():
        config: dict[str, Any] = {"seed": seed, "dataset": {"folds": 2, "fold": fold}}
        about = {"overrides": {"lr": "1"}, "config": config, "seedless_identity": "lr=1"}
        folder = RunPaths(tmp_path / f"seed={seed},fold={fold}")
        leave_run(tmp_path, folder.folder.name, value, **about)
        words = [f"seed={seed}", f"+dataset.fold={fold}", "lr=1", "dataset.folds=2"]
        update_result(folder, arguments=words)
    update_result(folder, status=FAILED, error="gone")
    assert "best         lr=2  accuracy/val 0.7500" in concluded(tmp_path), "it is whole"
    objective: Any = {"name": "accuracy/val", "value": 0.8}
    update_result(folder, status=COMPLETED, objective=objective)
    told = concluded(tmp_path)
    assert "best         lr=1 (4 of 4 repetitions)  accuracy/val 0.8000" in told
    command = "python -m expt -m lr=1 dataset.folds=2 dataset.fold=0,1 seed=3,10"
    assert f"      to train it: {command}" in told


def test_failures_of_one_cause_are_one_line(tmp_path: Path) -> None:
    for number in range(16):
        text = f"rank {number % 2} of 2 raised\n\nValueError: at 0x{number}f in step {number}"
        command = "python -m expt -m seed=range(16) hydra.sweep.dir=old"
        run = f"seed={number}"
        leave_run(tmp_path / "s", run, status=FAILED, error=text, command=command)
    for rate in (3, 4):
        text = f"lr={rate}: is too large"
        leave_run(tmp_path / "s", f"lr={rate}", status=FAILED, error=text, command=command)
    lines = concluded(tmp_path / "s")
    assert sum("raised" in line for line in lines) == 1
    assert sum("too large" in line for line in lines) == 2, "the values of settings differ"
    assert any(" and 15 more: rank " in line for line in lines)
    assert "  again: python -m expt -m 'seed=range(16)' hydra.sweep.dir=s" in lines


def test_a_sweep_from_python_is_called_again(tmp_path: Path) -> None:
    leave_run(tmp_path, "seed=0", status=FAILED, error="why", command="a.py 3")
    assert f"  again: call expt.sweep again, with folder={str(tmp_path)!r}" in concluded(tmp_path)
