"""What is mistyped beside a search's space: told in one line before it begins, and mended by what
is typed next.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import expt
from expt.command.hydra_files import about_run
from expt.errors import ConfigError
from expt.runs.attempt import record_refusal
from expt.runs.paths import RunPaths
from expt.runs.result import update_result
from tests.conftest import run

SHORT = (
    "dataset.train_limit=64",
    "batch_size=32",
    "world_size=1",
    "threads=1",
    "tensorboard.images=false",
)
SEARCH = ("search=random", *SHORT, "epochs=2", "optimizer.lr=tag(log,interval(1e-3,1))")
ONE_BY_ONE: Any = {"hydra": {"launcher": {"max_concurrent": 1}}, "quiet": True}
NO_STEP = "a has no checkpoint of step 3; it has step 2 (epoch 1"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run `a`, and a search `f` whose two points are done."""
    place = tmp_path_factory.mktemp("place")
    expt.run(*SHORT, "epochs=1", "checkpoint.keep=3", folder=place / "a", quiet=True)
    search(place / "f", 2)
    return place


@pytest.fixture(autouse=True)
def _there(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test in a folder of its own, with both."""
    monkeypatch.chdir(tmp_path)
    for name in ("a", "f"):
        shutil.copytree(place / name, name)


def search(folder: Path | str, runs: int, *words: str) -> Any:
    return expt.sweep(*SEARCH, f"search.runs={runs}", *words, folder=folder, **ONE_BY_ONE)


def rates(folder: str, **settings: Any) -> list[float]:
    """Those of the runs there that have completed with these settings, in their order."""
    found = [json.loads(path.read_text()) for path in Path(folder).glob("*/result.json")]
    of_these = [each for each in found if each["status"] == "completed"]
    of_these = [
        each
        for each in of_these
        if all(each["config"][key] == value for key, value in settings.items())
    ]
    return [
        each["overrides"]["optimizer.lr"]
        for each in sorted(of_these, key=lambda each: each["search"]["number"])
    ]


def files(folder: str) -> dict[Path, bytes]:
    return {
        path: path.read_bytes()
        for path in Path(folder).rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def test_what_no_point_can_begin_with_is_told_in_one_line_and_nothing_is_made() -> None:
    """In a new folder, and in one whose runs are of other settings, though they are as many as are
    asked for.
    """
    before = files("f")
    typed = run("-m", *SEARCH, "search.runs=2", "fork=a@3", "hydra.sweep.dir=f", cwd=Path.cwd())
    assert (typed.returncode, typed.stdout) == (2, "")
    assert typed.stderr.startswith(f"error: fork=a@3: {NO_STEP}")
    assert len(typed.stderr.splitlines()) == 1
    mistakes = {
        "fork=a@3": NO_STEP,
        "fork=a@2 model.hidden=[64]": "model.hidden=[64]: a fork keeps its model, and a has [256]",
        "weights=nosuch": "weights=nosuch: there is no such file or folder",
        "dataset=image_folder dataset.root=nosuch": "dataset.root=nosuch",
    }
    for words, problem in mistakes.items():
        for where in ("f", "new"):
            with pytest.raises(ConfigError) as raised:
                search(where, 2, *words.split())
            assert problem in str(raised.value)
            assert len(raised.value.problems) == 1
    for more in ("hydra.launcher.dry_run=true", "preflight=true"):
        asked = run(
            "-m",
            *SEARCH,
            "search.runs=2",
            "weights=nosuch",
            more,
            "hydra.sweep.dir=f",
            cwd=Path.cwd(),
        )
        assert (asked.returncode, len(asked.stderr.splitlines())) == (2, 1), asked.stderr
    assert files("f") == before
    assert not Path("new").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            "search=tpe search.rungs=asha",
            "search.rungs=asha: compares runs of as many epochs, which recipe changes",
        ),
        ("search=pbt", "epochs: search=pbt compares runs of as many epochs, which recipe changes"),
        ("search=pbt epochs=3", "recipe: a fork keeps its model"),
    ],
)
def test_runs_that_an_own_group_makes_no_rivals_are_refused_before_they_begin(
    words: str, told: str
) -> None:
    write_recipes((2, 8), (3, 16))
    typed = run(
        "-m",
        *SHORT,
        "+recipe=x,y",
        "search.runs=2",
        *words.split(),
        "hydra.sweep.dir=new",
        cwd=Path.cwd(),
    )
    assert (typed.returncode, typed.stdout) == (2, "")
    assert told in typed.stderr
    assert not Path("new").exists()


def test_a_population_of_choices_that_come_to_the_same_run_has_an_end() -> None:
    write_recipes((2, 8), (3, 8))
    typed = run("-m", *SHORT, "+recipe=x,y", "epochs=2", "search=pbt", "search.runs=3", "hydra.sweep.dir=new",
                cwd=Path.cwd())  # fmt: skip
    assert (typed.returncode, typed.stderr) == (0, "")
    assert "named twice" in typed.stdout
    assert len([*Path("new").glob("*/result.json")]) == 1


def write_recipes(*of: tuple[int, int]) -> None:
    for name, (epochs, width) in zip("xy", of, strict=True):
        file = Path("conf/recipe", f"{name}.yaml")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"# @package _global_\nepochs: {epochs}\nmodel: {{hidden: [{width}]}}\n")


def test_what_keeps_some_points_alone_from_beginning_is_told_in_their_turn() -> None:
    words = (*SEARCH[:-1], "search.runs=2", "fork=a@2", "model.hidden=[64],[256]")
    found = expt.sweep(*words, folder="new", **ONE_BY_ONE)
    assert [run.record["config"]["model"]["hidden"] for run in found.completed] == [[256]]
    assert ["a fork keeps its model" in str(run.error) for run in found.failed] == [True]


@pytest.mark.parametrize(
    ("mistyped", "mended", "settings"),
    [
        ("fork=a@3", "fork=a@2", {"fork": "a@2"}),
        ("weights=nosuch", "", {"fork": None, "weights": None}),
    ],
)
def test_a_point_that_was_refused_for_what_was_mistyped_is_made_with_what_is_typed_now(
    mistyped: str, mended: str, settings: dict[str, Any]
) -> None:
    points = rates("f")
    for number in (2, 3):
        refused = RunPaths(Path("f", f"refused-{number}"))
        words = [*SEARCH[1:-1], mistyped, "optimizer.lr=0.5"]
        about: Any = {**about_run(refused.folder.name, words), "search": {"number": number}}
        record_refusal(refused, about, None, ConfigError("as an older version left it"))
    runs = search("f", 3, *filter(None, [mended]))
    assert len(runs) == 3
    made = rates("f", **settings)
    assert len(made) == 3
    assert made[:2] == points, "the first points of the same search"


def test_a_point_that_was_refused_as_it_is_typed_now_is_tried_once_more() -> None:
    refused = RunPaths(Path("f", "refused"))
    words = [*SEARCH[1:-1], "threads=1", "optimizer.lr=0.5"]
    about: Any = {**about_run(refused.folder.name, words), "search": {"number": 2}}
    record_refusal(refused, about, None, ConfigError("its data was not there"))
    search("f", 3)
    assert rates("f")[2] == 0.5


def test_runs_whose_first_weights_are_gone_are_known_by_their_settings() -> None:
    (before,) = search("new", 1, "weights=a")
    shutil.rmtree("a")
    (again,) = search("new", 1, "weights=a")
    assert again.record == before.record, "nothing is left to be begun"
    with pytest.raises(ConfigError, match="weights=a: there is no such file or folder"):
        search("new", 2, "weights=a")


def test_a_fork_that_has_begun_goes_on_though_the_run_is_gone_of_which_no_further_one_can_begin() -> (
    None
):
    (fork,) = search("new", 1, "fork=a@2")
    shutil.rmtree("a")
    update_result(RunPaths(fork.folder), status="interrupted")
    (again,) = search("new", 1, "fork=a@2")
    assert (again.status, again.record["attempts"]) == ("completed", 2)
    with pytest.raises(ConfigError, match="fork=a@2: there is no folder a"):
        search("new", 2, "fork=a@2")
