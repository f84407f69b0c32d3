"""Which runs of a sweep that is under way an order is about, and what it says of itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from expt.command import live_sweep
from expt.command.aim import Aim, KnownRun, StandingOrders, meant
from expt.command.live_sweep import LOOK_S, REST_S, LiveSweep
from expt.command.overrides import as_dict, folder_names
from expt.config.constraints import Target
from expt.errors import ConfigError
from expt.launch.job import Job
from expt.machine import Machine
from expt.runs.paths import RunPaths
from tests.requests import request, settings

SWEEP = Path("sweep")


def jobs_of(*points: str) -> list[Job]:
    """Jobs of points such as `model.hidden=[32] optimizer.lr=0.1`, with the names that a sweep
    gives them.
    """
    words = [point.split() for point in points]
    return [
        _job(SWEEP / name, as_dict(point))
        for name, point in zip(folder_names(words), words, strict=True)
    ]


def _job(folder: Path, typed: dict[str, Any]) -> Job:
    asked = request(folder)
    changed: dict[str, Any] = {"model": asked.config.model, "optimizer": asked.config.optimizer}
    for key, value in typed.items():
        if key == "model":
            continue
        group, _, field = key.partition(".")
        if field:
            value = tuple(value) if isinstance(value, list) else value
            changed[group] = dataclasses.replace(changed[group], **{field: value})
        elif key in settings():
            changed[key] = value
    config = dataclasses.replace(asked.config, **changed)
    return Job(
        RunPaths(folder), dataclasses.replace(asked, config=config, about={"overrides": typed})
    )


def names_of(jobs: Sequence[Job], about: Sequence[str]) -> list[str]:
    """The runs that an order is about."""
    return [run.name for run in meant(about, [KnownRun(job) for job in jobs], SWEEP)[1]]


HIDDEN = jobs_of("model.hidden=[32]", "model.hidden=[64]")
GRID = jobs_of(
    *(
        f"experiment={name} model.hidden={hidden} optimizer.lr={lr}"
        for name in "ab"
        for hidden in ("[32]", "[64,32]")
        for lr in ("0.1", "1e-3")
    )
)


def test_a_sweep_that_rests_says_once_how_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool: Any = SimpleNamespace(rests=False)
    told, now = SimpleNamespace(told=list[str]()), [0.0]
    display: Any = SimpleNamespace(told=told.told.append)
    to_come: Any = None
    folder, orders = RunPaths(tmp_path / "my sweep"), StandingOrders()
    sweep = LiveSweep(
        folder, Machine(), pool, {}, display, [], lambda *_: [], lambda _: None, to_come, orders
    )
    monkeypatch.setattr(live_sweep, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def looks(seconds: float, *, rests: bool) -> int:
        pool.rests = rests
        for _ in range(round(seconds / LOOK_S) + 1):
            now[0] += LOOK_S * 1.01
            sweep.look()
        return len(told.told)

    assert looks(3, rests=False) == 0
    assert looks(REST_S / 2, rests=True) == 0, "between two runs, maybe"
    assert looks(1, rests=False) == 0
    assert looks(9, rests=True) == 1
    (line,) = told.told
    assert line.startswith("no run is under way: the sweep is paused; to go on: ")
    assert line.endswith(f" sweep resume '{tmp_path}/my sweep'")
    looks(1, rests=False)
    assert looks(9, rests=True) == 2, "paused once more"


@pytest.mark.parametrize(
    ("about", "names"),
    [
        ([], ["hidden=[32]", "hidden=[64]"]),
        (["hidden=[32]"], ["hidden=[32]"]),
        (["hidden=[*"], ["hidden=[32]", "hidden=[64]"]),
        (["model.hidden=[64]"], ["hidden=[64]"]),
        (["model.hidden!=[64]"], ["hidden=[32]"]),
        (["hidden!=[64]"], ["hidden=[32]"]),
    ],
)
def test_brackets_are_those_of_a_list(about: list[str], names: list[str]) -> None:
    assert names_of(HIDDEN, about) == names


@pytest.mark.parametrize(
    ("about", "number"),
    [
        (["hidden=[64,32]"], 4),
        (["hidden=[64,32]", "lr=1e-3"], 2),
        (["lr=0.001", "experiment=a"], 2),
        (["experiment=a,hidden=[32],lr=1e-3"], 1),
        (["experiment=a,*", "lr!=0.1"], 2),
        (["optimizer.lr<0.01"], 4),
    ],
)
def test_what_the_names_of_folders_say_is_understood(about: list[str], number: int) -> None:
    assert len(names_of(GRID, about)) == number


def test_a_model_of_ones_own_has_the_name_by_which_it_was_chosen() -> None:
    (job,) = jobs_of("model=mine optimizer.lr=0.1")
    assert job.request is not None
    own = dataclasses.replace(job.request.config, model=Target(target="my.nets.Net", kwargs={}))
    job.request = dataclasses.replace(job.request, config=own)
    assert names_of([job], ["model=mine"]) == [job.name]


@pytest.mark.parametrize(
    ("about", "says"),
    [
        ("nix", "nix: no run of sweep has that name"),
        ("lr=0.2", "lr=0.2: no run of sweep is that"),
        ("lr!=0.2", "lr!=0.2: no run has optimizer.lr=0.2, and so all would be meant"),
        ("experiment!=c", "experiment!=c: no run has experiment=c, and so all would be meant"),
        ("status!=failed", "status: no run has such a setting. Did you mean 'task'?"),
    ],
)
def test_an_order_that_is_about_no_run_is_refused(about: str, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        names_of(GRID, [about])
    assert str(refused.value) == says


def test_of_several_orders_to_runs_that_come_later_the_last_counts_and_what_is_dropped_stays_so() -> (
    None
):
    first, *_, last = GRID
    orders = StandingOrders()

    def aim(*about: str) -> Aim:
        return meant(about, [KnownRun(job) for job in GRID], SWEEP)[0]

    def held() -> list[bool | None]:
        return [orders.is_held(job) for job in (first, last)]

    assert held() == [None, None]
    orders.pause(aim("hidden=[64,32]"))
    assert held() == [None, True]
    orders.pause(aim())
    orders.resume(aim("experiment=b"))
    assert held() == [True, False]
    orders.leave_out(first)
    assert held() == [None, False], "it was added since"
    orders.drop(aim())
    orders.resume_all()
    assert [orders.is_dropped(job) for job in (first, last)] == [False, True]
