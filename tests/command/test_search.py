"""A search as it is typed: trials one by one, and a folder that holds all its state."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from filelock import FileLock

import expt
from expt.command import report
from expt.command.search_space import space_of
from expt.errors import ConfigError
from expt.machine import Machine
from expt.runs.paths import RunPaths
from expt.search.space import Parameter
from tests.composing import composed, composer
from tests.facade import Capture, Patch, as_typed, run

SMALL = {
    "epochs": 1,
    "world_size": 1,
    "dataset": {"train_limit": 64},
    "tensorboard": {"images": False},
}
ONE_BY_ONE = {"launcher": {"max_concurrent": 1}}
LR = {"lr": expt.interval(1e-3, 1.0, log=True)}
SPACE: Any = {
    "optimizer": LR,
    "model": {"hidden": [(8,), (16,)]},
    "hydra": ONE_BY_ONE,
    "quiet": True,
}


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a search of three points, one run at a time."""
    folder = tmp_path_factory.mktemp("searched") / "search"
    expt.sweep(SMALL, **SPACE, search={"name": "tpe", "runs": 3}, folder=folder)
    return folder


def records(folder: Path) -> dict[int, dict[str, Any]]:
    found = [json.loads(path.read_text()) for path in folder.glob("*/result.json")]
    return {record["search"]["number"]: record for record in found}


def points(folder: Path) -> dict[int, Any]:
    return {
        number: (each["arguments"], each["objective"]["value"])
        for number, each in records(folder).items()
    }


def test_run_of_a_search_equals_one_typed_by_hand(searched: Path, tmp_path: Path) -> None:
    found = records(searched)
    assert sorted(found) == [0, 1, 2]
    for record in found.values():
        assert not any(word.startswith("search") for word in record["arguments"])
        assert "search" not in record["config"]
        assert 1e-3 <= record["config"]["optimizer"]["lr"] <= 1
        assert record["device_s"] > 0
    assert yaml.safe_load((searched / "multirun.yaml").read_text())["search"]["runs"] == 3
    again = expt.sweep(*found[1]["arguments"], folder=searched, quiet=True)
    assert len(list(searched.glob("*/result.json"))) == 3, "it is known, and not made again"
    assert again[0].record["identity"] == found[1]["identity"]


def test_unchosen_run_of_the_space_may_be_best(searched: Path, tmp_path: Path) -> None:
    folder = tmp_path / "search"
    shutil.copytree(searched, folder)
    best = max(records(folder).values(), key=lambda record: record["objective"]["value"])["name"]
    record = json.loads((folder / best / "result.json").read_text())
    del record["search"]  # as a grid leaves it
    (folder / best / "result.json").write_text(json.dumps(record))
    runs = expt.sweep(SMALL, **SPACE, search={"name": "tpe", "runs": 2}, folder=folder)
    assert (len(runs), runs.best.folder.name) == (3, best), "nothing is trained"


def test_a_search_concludes_with_its_best_and_report_does(searched: Path, capsys: Capture) -> None:
    best = max(records(searched).values(), key=lambda record: record["objective"]["value"])
    assert report.main([str(searched)]) == 0
    out = capsys.readouterr().out
    assert f"best         {best['name']}  accuracy/val {best['objective']['value']:.4f}" in out
    assert (
        f"optimizer.lr={best['config']['optimizer']['lr']}"
        in out.partition("      to train it: python -m expt ")[2]
    )
    assert "optimizer.lr" in out.splitlines()[0]
    assert "model.hidden" in out.splitlines()[0]


def test_several_goals_make_a_table_limits_exclude(tmp_path: Path, capsys: Capture) -> None:
    search = {
        "name": "nsga2",
        "runs": 3,
        "constraints": ["loss/val<1000", "speed/epoch_s>0"],
        "batch": 2,
    }
    goals = ("speed/samples_per_s", "loss/val")
    runs = expt.sweep(
        SMALL,
        optimizer=LR,
        search=search,
        objective=goals,
        folder=tmp_path / "two",
        hydra=ONE_BY_ONE,
    )
    out = capsys.readouterr().out
    assert {run.record["objective"]["name"] for run in runs} == {"loss/val"}, "best at a metric"
    assert "limits       3 of 3 runs keep loss/val<1000 and speed/epoch_s>0" in out
    assert " of 3 runs, which no other beats in all goals" in out
    expected = ["run", "speed/samples_per_s", "loss/val"]
    assert out.partition("Pareto")[2].splitlines()[1].split() == expected


def test_a_dry_run_shows_the_next_trial(searched: Path, tmp_path: Path) -> None:
    words = (
        *as_typed("-m search=tpe optimizer.lr=tag(log,interval(0.001,1.0))"),
        "hydra.launcher.dry_run=true",
    )
    first = run(*words, "search.runs=6", "hydra.sweep.dir=new", cwd=tmp_path)
    assert first.stdout.splitlines()[-1] == "trial 1 of 6", first.stderr
    of_searched = ("model.hidden=[8],[16]", "epochs=1", "world_size=1", "dataset.train_limit=64")
    none = run(*words, *of_searched, "search.runs=3", f"hydra.sweep.dir={searched}", cwd=tmp_path)
    assert none.stdout == "no further trial of 3\n", none.stderr


def test_search_record_stays_where_nothing_trains(searched: Path, tmp_path: Path) -> None:
    """`expt report` reads the limits there, and the goals."""
    folder = tmp_path / "search"
    shutil.copytree(searched, folder)
    before = (folder / "multirun.yaml").read_bytes()
    other: Any = {"name": "tpe", "runs": 3, "constraints": ["loss/val<0.001"]}
    for instead in ({"hydra": {"launcher": {"dry_run": True}}}, {"preflight": True}):
        expt.sweep(SMALL, **{**SPACE, **instead}, search=other, folder=folder)
        assert (folder / "multirun.yaml").read_bytes() == before
        expt.sweep(SMALL, seed=[1, 2], quiet=True, **instead, folder=folder)
        assert (folder / "multirun.yaml").read_bytes() == before, "a grid's is Hydra's"
    with (
        FileLock(RunPaths(folder).lock),
        pytest.raises(ConfigError, match="another command is at work there"),
    ):
        expt.sweep(SMALL, seed=[1, 2], quiet=True, folder=folder)
    assert (folder / "multirun.yaml").read_bytes() == before


def space(
    *words: str, when: tuple[str, ...] = (), beside: tuple[str, ...] = ()
) -> dict[str, Parameter]:
    found = space_of(
        words, when, composer(), lambda fixed: composed(*beside, *fixed), Machine(gpus=(), cpus=2)
    )
    return {parameter.name: parameter for parameter in found.parameters}


def test_choices_in_any_order_are_one_space() -> None:
    chosen = space("seed=shuffle(1,2,3,4,5,6,7,8)")["seed"].choices
    assert chosen == (*"12345678",)


def test_hydras_grammar_is_the_space() -> None:
    found = space(
        *as_typed("optimizer.lr=tag(log,interval(1e-4,1)) batch_size=interval(16,64)"),
        *as_typed("epochs=int(interval(1,8)) model=mlp,convnet seed=range(3)"),
        *as_typed("label_smoothing=range(0,0.3,0.1) ema=null,0.9"),
        when=(
            "model=convnet: model.dropout=interval(0,0.5)",
            "model=mlp: model.hidden=[8],[16,16]",
        ),
    )
    kinds: dict[str, Any] = {
        name: (each.kind, each.low, each.high, each.log, each.step) for name, each in found.items()
    }
    assert kinds["optimizer.lr"] == ("float", 1e-4, 1.0, True, None)
    assert kinds["batch_size"] == ("int", 16, 64, False, None), "its key takes whole numbers alone"
    assert kinds["epochs"] == ("int", 1, 8, False, None)
    assert kinds["seed"] == ("int", 0, 2, False, 1)
    assert kinds["label_smoothing"] == ("float", 0, pytest.approx(0.2), False, 0.1)
    assert (found["model"].choices, found["ema"].meant) == (("mlp", "convnet"), (None, 0.9))
    assert found["model.dropout"].when == ("model", "convnet")
    assert found["model.hidden"].when == ("model", "mlp")
    assert found["model.hidden"].meant == ([8], [16, 16])


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("optimizer.momentum=range(0.7,1.0,0.1)", [0.7, 0.8, 0.9]),
        ("optimizer.momentum=range(0.7,0.9,0.1)", [0.7, 0.8]),
        ("optimizer.weight_decay=range(0,1.2,0.3)", [0, 0.3, 0.6, 0.9]),
        ("optimizer.weight_decay=range(0.1,0.36,0.02)", [*(n / 100 for n in range(10, 36, 2))]),
        ("optimizer.momentum=range(0.9,0.6,-0.1)", [0.7, 0.8, 0.9]),
    ],
)
def test_a_range_has_its_last_value_as_it_is_typed(word: str, values: list[float]) -> None:
    (found,) = space(word).values()
    assert (found.all(), found.high) == (values, values[-1])
    assert found.ends == [values[0], values[-1]]
    assert set(map(found.read, values)) == set(values)


@pytest.mark.parametrize(
    ("word", "kind"),
    [
        ("model.width=interval(4,64)", "int"),
        ("model.width=tag(log,interval(4, 64))", "int"),
        ("model.width=interval(4.0,64)", "float"),
        ("model.rate=interval(0,2)", "float"),
        ("model.rate=int(interval(0,2))", "int"),
        ("optimizer.lr=interval(1,2)", "float"),
    ],
)
def test_an_own_class_is_given_whole_numbers_where_it_has_one(word: str, kind: str) -> None:
    (found,) = space(word, beside=("model={_target_: mine.Net, width: 32, rate: 0.5}",)).values()
    assert found.kind == kind
    assert {type(end) for end in (found.low, found.high)} == {int if kind == "int" else float}


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["model=interval(0,1)"], "model=interval(0,1): "),
        (["optimizer.lr=tag(log,interval(0,1))"], "optimizer.lr=tag(log,interval(0,1)): "),
        (["optimizer.lr=interval(1,1)"], "optimizer.lr=interval(1,1): is empty"),
        (["seed=range(3,3)"], "seed=range(3,3): "),
        (["model=glob(zz*)"], "model=glob(zz*): has no value"),
        (["optimizer.lr=interval(0.1,2)", "batch_size=interval(0,8)"], "batch_size=0: "),
        (["amp=interval(0,1)"], "amp="),
        (["seed=tag(log,choice(1,2))"], "seed=tag(log,choice(1,2)): "),
        (["epochs=3"], "search: nothing to search"),
    ],
)
def test_a_wrong_axis_is_refused(words: list[str], key: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(key)):
        space(*words)


@pytest.mark.parametrize(
    "words", ["seed=1,2", "dataset.folds=3 dataset.fold=range(3)", "seed=int(interval(0,9))"]
)
@pytest.mark.parametrize("is_condition", [False, True])
def test_a_repetition_is_no_hyperparameter(words: str, is_condition: bool, tmp_path: Path) -> None:
    *fixed, axis = words.split()
    key = axis.partition("=")[0]
    when = (f"search.when=['model=mlp: {axis}']", "model=mlp,convnet") if is_condition else (axis,)
    given = (*fixed, *when, "search=tpe", f"hydra.sweep.dir={tmp_path / 'search'}")
    with pytest.raises(ConfigError, match=f"^{key}: repeats a trial"):
        expt.sweep("optimizer.lr=tag(log,interval(1e-4,1))", *given)
    assert not (tmp_path / "search").exists()


def test_choices_that_differ_by_their_seed_are_repetitions(tmp_path: Path) -> None:
    for name, text in {"a": "seed: 0", "b": "seed: 1", "c": "seed: 1\nbatch_size: 32"}.items():
        file = tmp_path / f"experiment/{name}.yaml"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"# @package _global_\n{text}\n")
    given = ("search=random", "search.runs=1", "--config-dir", str(tmp_path))
    words = (*given, f"hydra.sweep.dir={tmp_path / 'search'}", "hydra.launcher.dry_run=true")
    with pytest.raises(ConfigError, match=r"^experiment: repeats a trial"):
        expt.sweep("experiment=c,b,a", "optimizer.lr=interval(0.1,1)", *words)
    assert expt.sweep("experiment=a,c", "optimizer.lr=interval(0.1,1)", *words) == []


SCORING = """
import expt
from torch.nn.functional import cross_entropy

class Scored(expt.Task):
    def loss(self, outputs, batch):
        return cross_entropy(outputs, batch.targets, reduction="sum"), len(outputs)

    def measure(self, outputs, batch):
        return {"score": (outputs.sum(), len(outputs))}
"""


@pytest.mark.slow
def test_a_warm_start_of_another_question_says_so(tmp_path: Path, capfd: Capture) -> None:
    table = tmp_path / "table.csv"
    table.write_text("a,y\n" + "".join(f"{n % 7},{n % 2}\n" for n in range(40)))
    shared = [f"dataset.path={table}", "dataset.targets=y", "batch_size=8", "epochs=1"]
    shared += ["dataset=table", "task=classification", "model=mlp", "model.hidden=[4]"]
    search = ("search=tpe", "search.runs=1", "optimizer.lr=interval(0.1,1)")
    source = tmp_path / "before"
    expt.sweep(*shared, *search, folder=source, quiet=True)

    def said(*words: str) -> str:
        more = (f"search.warm_start=[{source}]", "hydra.launcher.dry_run=true", *words)
        expt.sweep(*shared, *search, *more, folder=tmp_path / "after", quiet=True)
        first = [each for each in capfd.readouterr().err.splitlines() if "warm_start" in each]
        return first[0].rpartition("this search: ")[2] if first else ""

    capfd.readouterr()
    assert said() == said("seed=3") == ""
    assert said("epochs=2") == "epochs=1 there, 2 here"
    assert said("objective=loss/val") == "objective=accuracy/val there, loss/val here"
    assert said("optimizer.momentum=0.5", "dataset.val_fraction=0.25").startswith("dataset.val_f")
    assert said("dataset.val_split=last").startswith("dataset.val_split=")
    assert said("task=regression").startswith("objective=accuracy/val there")
    assert said("dataset.train_limit=20").startswith("dataset.train_limit=")
    table.write_text(table.read_text() + "3,0\n")
    assert said("epochs=2") == "its dataset's files changed since"


@pytest.mark.slow
def test_a_warm_start_of_the_other_direction_says_so(
    tmp_path: Path, capfd: Capture, monkeypatch: Patch
) -> None:
    (tmp_path / "scoring.py").write_text(SCORING)
    monkeypatch.syspath_prepend(tmp_path)
    search = ("search=tpe", "search.runs=1", "optimizer.lr=interval(0.1,1)", "objective=score/val")
    shared = (*search, "epochs=1", "dataset.train_limit=64")
    task = "task={_target_: scoring.Scored, metrics: {score: %s}}"
    source = tmp_path / "before"
    expt.sweep(task % "max", *shared, folder=source, quiet=True)
    for way, expected in {"max": "", "min": "the highest score/val is best there"}.items():
        capfd.readouterr()
        more = (f"search.warm_start=[{source}]", "hydra.launcher.dry_run=true")
        expt.sweep(task % way, *shared, *more, folder=tmp_path / way, quiet=True)
        said = capfd.readouterr().err
        assert ("another question" in said) is bool(expected)
        assert expected in said


@pytest.mark.parametrize(
    ("when", "said"),
    [
        ("model=resnet18: model.dropout=0.1,0.2", "resnet18"),
        ("modl=mlp: model.dropout=0.1,0.2", "Did you mean 'model'?"),
        ("zz=1: epochs=1,2", "zz"),
        ("model=mlp: model.dropout=0.1", "model.dropout=0.1"),
        ("model.dropout=0.1,0.2", "write 'KEY=CHOICE: AXIS'"),
        ("optimizer=sdg: optimizer.lr=0.1,0.2", "Did you mean 'sgd'?"),
    ],
)
def test_a_wrong_condition_is_refused(when: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(f'search.when={when}: ')}") as raised:
        space("model=mlp,convnet", "seed=range(3)", when=(when,))
    assert said in str(raised.value)


def test_conditions_exclude_each_other_and_stand_below_one_another() -> None:
    lr = (
        "optimizer=adam: optimizer.lr=interval(1e-4,1e-2)",
        "optimizer=sgd: optimizer.lr=interval(1e-2,1)",
    )
    found = space("optimizer=sgd,adam", when=lr)
    expected = (("optimizer", "sgd"), 1e-2)
    assert (found["optimizer.lr"].when, found["optimizer.lr"].low) == expected, "the last of two"
    chain = ("model=mlp: model.hidden=[8],[16]", "model.hidden=[8]: model.dropout=interval(0,0.5)")
    for when in (chain, chain[::-1]):
        found = space("model=mlp,convnet", when=when)
        assert found["model.dropout"].when == ("model.hidden", "[8]")
        assert [*found] == ["model", "model.hidden", "model.dropout"]


@pytest.mark.parametrize(
    ("words", "when"),
    [
        ("seed=range(3) model=mlp,convnet", ["model=mlp: seed=range(3,5)"]),
        ("model=mlp,convnet", ["model=mlp: model=mlp,convnet"]),
        ("", ["model=mlp: model=mlp,convnet"]),
        ("seed=1,2", ["seed=1: model=mlp,convnet", "model=mlp: seed=1,2"]),
        ("", ["model=mlp: optimizer=sgd,adam", "optimizer=sgd: model=mlp,convnet"]),
        (
            "model=mlp,convnet optimizer=sgd,adam",
            ["model=mlp: seed=1,2", "optimizer=sgd: seed=2,3"],
        ),
    ],
)
def test_key_searched_twice_or_circular_is_refused(words: str, when: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"would depend on itself|is searched twice"):
        space(*words.split(), when=tuple(when))


def test_a_condition_names_a_choice_as_it_is_typed() -> None:
    found = space("weights=a b,c", when=("weights=a b: seed=1,2",))
    assert found["seed"].is_active({"weights": found["weights"].choices[0]})


def test_a_block_of_a_choice_that_is_fixed_is_of_all_points() -> None:
    blocks = ("model=mlp: model.hidden=[8],[16]", "model=convnet: seed=1,2")
    found = space(when=blocks)  # model=mlp is the default
    assert {name: each.when for name, each in found.items()} == {"model.hidden": None}
    with pytest.raises(ConfigError, match=r"^search: nothing to search"):
        space(when=blocks[1:])


def test_runs_of_other_settings_in_the_folder_do_not_count(tmp_path: Path, capsys: Capture) -> None:
    """What changes no number makes no other run, and `resume=auto` continues a shorter one."""
    folder = tmp_path / "search"

    def search(runs: int, **more: Any) -> Any:
        found = {"name": "random", "runs": runs}
        return expt.sweep(
            {**SMALL, **more}, optimizer=LR, hydra=ONE_BY_ONE, search=found, folder=folder
        )

    short = search(2)
    capsys.readouterr()
    search(1, epochs=2)
    out, err = capsys.readouterr()
    assert f"hydra.sweep.dir={folder}: has 2 runs of other settings (epochs)" in err
    assert "[1/1] done" in out
    again = search(2, epochs=2, threads=1, print_every=100, resume="auto")
    assert len(again) == 2
    found = [json.loads(path.read_text()) for path in folder.glob("*/result.json")]
    longer = {each["search"]["number"]: each for each in found if each["config"]["epochs"] == 2}
    assert {*longer} == {0, 1}
    for number, each in longer.items():
        shorter = short[number].record
        assert each["overrides"]["optimizer.lr"] == shorter["overrides"]["optimizer.lr"]
    assert short[1].folder.name in longer[1]["resumed_from"]["checkpoint"]


def test_an_integer_is_moved_to_the_nearest_with_which_a_run_can_be(tmp_path: Path) -> None:
    """A batch that two workers share, in two micro-batches each; both are searched."""
    found = expt.sweep(
        {**SMALL, "world_size": 2},
        batch_size=expt.interval(7, 17),
        gradient_accumulation=expt.interval(1, 3),
        hydra=ONE_BY_ONE,
        quiet=True,
        search={"name": "random", "runs": 3},
        folder=tmp_path / "search",
    )
    assert [each.record["status"] for each in found] == ["completed"] * 3
    for each in records(tmp_path / "search").values():
        searched = each["config"]
        assert searched["batch_size"] % (2 * searched["gradient_accumulation"]) == 0
