"""The summary of a sweep, from records as runs leave them."""

import csv
import io
from pathlib import Path
from typing import Any

import pytest

from expt.config import own_code
from expt.runs.paths import RunPaths
from expt.runs.result import COMPLETED, FAILED, INTERRUPTED, PRUNED, create_result, update_result
from expt.runs.view import leaderboard, settings
from expt.runs.view.summary import print_stale, stale
from expt.runs.view.text import Console
from tests.facade import Patch, record_points


def leave_run(folder: Path, name: str, value: float | None = None, **fields: Any) -> None:
    """The result.json of a run called `name`: completed with `value`, or as `fields` say."""
    objective = fields.pop("objective", "accuracy/val")
    overrides = fields.pop("overrides", dict(pair.split("=") for pair in name.split(",")))
    fields["config"] = {"task": {"name": "classification"}, **fields.get("config", {})}
    outcome: dict[str, Any] = {}
    if value is not None:
        metrics = {objective: value, "loss/train": 0.5}
        outcome = {"status": COMPLETED, "metrics": metrics, "epoch_s": [1.0, 2.0]}
        outcome["objective"] = {"name": objective, "value": value}
    arguments = [f"{key}={setting}" for key, setting in overrides.items()]
    about: dict[str, Any] = {
        "identity": f"id-{name}",
        "overrides": overrides,
        "arguments": arguments,
    }
    create_result(
        RunPaths(folder / name), **about, **{"command": "python -m expt -m seed=0,1", **fields}
    )
    update_result(
        RunPaths(folder / name),
        **outcome,
        **{key: fields[key] for key in fields if key == "status"},
    )


def rows_of(folder: Path) -> list[settings.Row]:
    return settings.rows(settings.read_runs(folder))


def names(folder: Path) -> list[list[str]]:
    return [[run.folder.name for run in row.runs] for row in rows_of(folder)]


def summary(folder: Path, name: str) -> list[str]:
    """The lines of a summary file, which is written now."""
    leaderboard.write_summary(folder, settings.read_runs(folder))
    return (folder / name).read_text().splitlines()


def leave_notes(folder: Path, *notes: object) -> None:
    """Equal runs that differ in a setting."""
    for number, note in enumerate(notes):
        leave_run(folder, f"run={number}", 0.5, overrides={"note": note})


@pytest.mark.parametrize(("objective", "best"), [("accuracy/val", "lr=3"), ("loss/val", "lr=1")])
def test_best_comes_first_in_both_directions(tmp_path: Path, objective: str, best: str) -> None:
    for name, value in {"lr=2": 0.5, "lr=3": 0.9, "lr=1": 0.1}.items():
        leave_run(tmp_path, name, value, objective=objective)
    leave_run(tmp_path, "lr=4", status=FAILED, error="rank 0 raised\n\nTraceback\nValueError: bad")
    leave_run(tmp_path, "lr=5", float("nan"), objective=objective)
    leave_run(tmp_path, "lr=6", 0.99 if best == "lr=3" else 0.01, objective=objective)
    update_result(RunPaths(tmp_path / "lr=6"), status=FAILED)  # after its best epoch
    found = names(tmp_path)
    assert found[0] == [best]
    assert found[1] == ["lr=2"]
    assert sorted(found[3:]) == [["lr=4"], ["lr=5"], ["lr=6"]], "without a value: last"


def test_of_equal_runs_of_a_search_the_first_point_comes_first(tmp_path: Path) -> None:
    for number, name in enumerate(("lr=3", "lr=1", "lr=2")):
        leave_run(tmp_path, name, 0.5, search={"number": number})
    assert names(tmp_path) == [["lr=3"], ["lr=1"], ["lr=2"]]


def test_seeds_are_joined_as_mean_and_standard_deviation(tmp_path: Path) -> None:
    for seed, value in enumerate((0.1, 0.2, 0.6)):
        leave_run(tmp_path, f"lr=1,seed={seed}", value)
    leave_run(tmp_path, "lr=2,seed=0", 0.2)
    leave_run(tmp_path, "lr=2,seed=1", status=FAILED, error="gone")
    first, second = rows_of(tmp_path)
    assert (first.settings, first.status) == ({"lr": "1"}, "completed")
    assert first.mean == pytest.approx(0.3)
    assert (second.status, second.mean) == ("1 of 2 completed", 0.2)
    assert summary(tmp_path, "summary.md") == [
        "| lr | accuracy/val | status | train_s |",
        "|---|---|---|---|",
        # of a sample: the squares of 0.2, 0.1 and 0.3, over 2
        "| 1 | 0.3000 ± 0.2646 (3) | completed | 3.0 |",
        "| 2 | 0.2000 | 1 of 2 completed | 3.0 |",
    ]


def test_folds_are_joined_as_seeds_are(tmp_path: Path) -> None:
    for fold, value in enumerate((0.1, 0.2, 0.6)):
        typed = {"lr": 1, "dataset.folds": 3, "dataset.fold": fold, "seed": fold % 2}
        config = {"dataset": {"folds": 3, "fold": fold}, "seed": fold % 2}
        leave_run(tmp_path, f"fold={fold}", value, overrides=typed, config=config)
    none: Any = {"dataset": {"folds": None, "fold": None}}
    leave_run(tmp_path, "fold=none", 0.3, overrides={"lr": 1}, config=none)
    joined, alone = rows_of(tmp_path)
    assert (len(joined.runs), joined.settings) == (3, {"dataset.folds": 3})
    assert joined.mean == pytest.approx(0.3)
    assert len(alone.runs) == 1


def test_summary_csv_has_a_line_for_each_run(tmp_path: Path) -> None:
    leave_run(tmp_path, "lr=1", 0.25, device_s=7.5, energy_j=900.0)
    error = "rank 1 of 2 raised\n\nTrace\nValueError: a, b\n\nlog: l.log"
    leave_run(tmp_path, "lr=2", status=FAILED, error=error)
    leave_run(tmp_path, "lr=3")  # running
    found = {row["run"]: row for row in csv.DictReader(summary(tmp_path, "summary.csv"))}
    assert list(found) == ["lr=1", "lr=2", "lr=3"]
    assert [row["status"] for row in found.values()] == ["completed", "failed", "running"]
    good = found["lr=1"]
    assert good["lr"] == "1"
    assert good["objective"] == "0.25"
    assert good["accuracy/val"] == "0.25"
    assert good["loss/train"] == "0.5"
    assert (good["identity"], good["train_s"], good["error"]) == ("id-lr=1", "3", "")
    assert found["lr=2"]["error"] == "rank 1 of 2 raised: ValueError: a, b  (log: l.log)"
    assert found["lr=3"]["objective"] == ""
    expected = [("7.5", "900"), ("0", ""), ("0", "")]
    assert [(row["device_s"], row["energy_j"]) for row in found.values()] == expected


def test_a_setting_and_a_result_of_one_name_have_columns_of_their_own(tmp_path: Path) -> None:
    for number, objective in enumerate(("loss/val", "accuracy/val")):
        overrides = {"objective": objective, "lr": number}
        leave_run(tmp_path, f"run={number}", 0.5 + number, objective=objective, overrides=overrides)
    update_result(RunPaths(tmp_path / "run=1"), metrics={"loss/val": 2.5})
    head, *below = csv.reader(summary(tmp_path, "summary.csv"))
    assert len({*head}) == len(head)
    found = [dict(zip(head, line, strict=True)) for line in below]
    expected = [("loss/val", "0.5"), ("accuracy/val", "2.5")]
    assert [(run["objective_setting"], run["objective"]) for run in found] == expected
    assert summary(tmp_path, "summary.md")[0].startswith("| objective | lr | ")


def test_what_was_typed_alike_and_is_not_alike_is_no_seed(tmp_path: Path) -> None:
    """Runs of another `${oc.env:LRX}`, an edited YAML or another identity are not seeds of one."""
    for seed, lr in enumerate((1e-4, 1e-4, 0.3)):
        config = {"optimizer": {"lr": lr}, "model": {"name": "mlp", "width": 3}, "seed": seed}
        typed = {"optimizer.lr": "${oc.env:LRX}", "seed": seed}
        more: Any = {"overrides": typed, "config": config, "seedless_identity": f"{lr}"}
        leave_run(tmp_path, f"seed={seed}", [0.1, 0.2, 0.9][seed], **more)
    edited = {"optimizer": {"lr": 0.3}, "model": {"name": "mlp", "width": 4}, "seed": 3}
    more = {"overrides": {"optimizer.lr": 0.3, "seed": 3}, "seedless_identity": "edited"}
    leave_run(tmp_path, "seed=3", 0.5, config=edited, **more)
    assert [(row.settings, len(row.runs)) for row in rows_of(tmp_path)] == [
        ({"optimizer.lr": 0.3, "model.width": 3}, 1),
        ({"optimizer.lr": 0.3, "model.width": 4}, 1),
        ({"optimizer.lr": 1e-4, "model.width": 3}, 2),
    ]


def test_one_nan_is_said_and_ends_nothing(tmp_path: Path) -> None:
    for seed, value in enumerate((0.1, float("nan"), 0.6)):
        leave_run(tmp_path, f"lr=1,seed={seed}", value)
    leave_run(tmp_path, "lr=2,seed=0", 0.2)
    leave_run(tmp_path, "lr=3,seed=0", float("nan"))
    assert all("NaN" not in path.read_text() for path in tmp_path.glob("*/result.json"))
    assert [line.split(" | ")[:3] for line in summary(tmp_path, "summary.md")[2:]] == [
        ["| 2", "0.2000", "completed"],
        ["| 1", "nan (1 of 3)", "completed"],
        ["| 3", "nan", "completed"],
    ]


def printed(folder: Path, width: int = 200, **how: Any) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(leaderboard.leaderboard(settings.read_runs(folder), **how))
    return out.getvalue()


def shown(folder: Path, **how: Any) -> list[list[str]]:
    return [line.split() for line in printed(folder, **how).splitlines()]


def test_values_are_shown_as_they_are(tmp_path: Path) -> None:
    leave_notes(tmp_path, "d[old]", "d[/b]", ":smile:", "\x1b[31mred", 1e12, 1e-5)
    assert [line[0] for line in shown(tmp_path)] == [
        "note", "d[old]", "d[/b]", ":smile:", "\\x1b[31mred", "1e12", "1e-5"
    ]  # fmt: skip


def test_no_cell_is_a_formula(tmp_path: Path) -> None:
    leave_notes(tmp_path, "=cmd|' /C calc'!A0", "-0.5", "+x", "@y", -3.0)
    notes = [row["note"] for row in csv.DictReader(summary(tmp_path, "summary.csv"))]
    assert notes == ["'=cmd|' /C calc'!A0", "-0.5", "'+x", "'@y", "-3"]


def test_the_test_stands_beside_the_objective_and_may_sort(tmp_path: Path) -> None:
    for lr, (val, test) in enumerate(((0.5, 0.75), (0.625, 0.25), (0.25, 0.5)), 1):
        leave_run(tmp_path, f"lr={lr}", val)
        found = {"accuracy/val": val, "accuracy/test": test}
        update_result(RunPaths(tmp_path / f"lr={lr}"), metrics=found)
    head, *lines = shown(tmp_path)
    assert head == ["lr", "accuracy/val", "accuracy/test", "status", "train", "time"]
    expected = [["2", "0.6250", "0.2500"], ["1", "0.5000", "0.7500"], ["3", "0.2500", "0.5000"]]
    assert [line[:3] for line in lines] == expected
    assert [line[0] for line in shown(tmp_path, sort="accuracy/test")[1:]] == ["1", "3", "2"]


@pytest.mark.parametrize(
    ("task", "objective", "beside"),
    [
        ("regression", "loss/val", ["mae/val"]),
        ("language_model", "loss/val", ["perplexity/val"]),
        ("classification", "accuracy/val", []),
    ],
)
def test_without_a_test_the_tasks_metric_of_val_stands_beside_the_loss(
    tmp_path: Path, task: str, objective: str, beside: list[str]
) -> None:
    leave_run(tmp_path, "lr=1", 0.25, objective=objective, config={"task": {"name": task}})
    best: Any = {"metric": objective, "value": 0.25, "epoch": 1}
    found = dict.fromkeys((objective, "loss/val", *beside), 0.5)
    update_result(RunPaths(tmp_path / "lr=1"), metrics=found, best=best)
    points = [(10, 1, dict.fromkeys(found, 0.25)), (20, 2, found)]
    record_points(RunPaths(tmp_path / "lr=1"), *points)
    head, line = shown(tmp_path)
    assert head == ["lr", objective, *beside, "status", "train", "time"]
    assert line[:-2] == ["1", "0.2500", *(["0.2500"] * len(beside)), "completed"], "of epoch 1"


def test_a_run_that_was_chosen_by_another_objective_shows_that_of_the_table(tmp_path: Path) -> None:
    """In the epoch whose checkpoint it keeps, as the others do."""
    leave_run(tmp_path, "lr=1", 0.9)
    best: Any = {"metric": "loss/val", "value": 7.0, "epoch": 1}
    of_each = {"lr=2": {"loss/val": 7.0, "accuracy/val": 0.8}, "lr=3": {"loss/val": 8.0}}
    for name, metrics in of_each.items():
        leave_run(tmp_path, name, 7.0, objective="loss/val")
        update_result(RunPaths(tmp_path / name), metrics=metrics, best=best)
    points = ((10, 1, {"accuracy/val": 0.95}), (20, 2, {"accuracy/val": 0.8}))
    record_points(RunPaths(tmp_path / "lr=2"), *points)
    shown = [line.split("|")[1:3] for line in summary(tmp_path, "summary.md")]
    assert shown[0] == [" lr ", " accuracy/val "]
    assert shown[2:] == [[" 2 ", " 0.9500 "], [" 1 ", " 0.9000 "], [" 3 ", "  "]]
    in_csv = csv.DictReader(summary(tmp_path, "summary.csv"))
    expected = [("1", "0.9"), ("2", "0.95"), ("3", "")]
    assert [(row["lr"], row["objective"]) for row in in_csv] == expected


def test_a_narrow_terminal_folds_settings_and_no_number(tmp_path: Path) -> None:
    for model in ("a_model_with_a_long_name_that_needs_room", "mlp"):
        for seed in (0, 1):
            name = f"model={model},optimizer.lr=0.001,seed={seed}"
            leave_run(tmp_path, name, 0.5, seedless_identity=model)
    leave_run(tmp_path, "model=mlp,optimizer.lr=0.1,seed=0", status=INTERRUPTED)
    text = printed(tmp_path, width=80)
    *lines, note = text.splitlines()
    assert any("0.5000 ± 0.0000 (2)" in line for line in lines)
    assert {len(line) for line in lines} == {80}
    assert note == leaderboard.SPREAD, "below the table, and not folded to its width"
    assert lines[0].endswith("train time")
    assert {"interrupted", "completed", "accuracy/val"} <= {*text.split()}, text


def test_what_has_paused_shows_what_it_has_reached(tmp_path: Path) -> None:
    def leave(name: str, value: float, status: str, epochs: int = 2) -> None:
        identity = name.partition(",")[0]
        leave_run(tmp_path, name, value, config={"epochs": 9}, seedless_identity=identity)
        update_result(RunPaths(tmp_path / name), status=status, epoch_s=[1.0] * epochs)

    ends = (0.5, COMPLETED), (0.9, PRUNED), (0.8, PRUNED), (0.95, FAILED)
    for lr, (value, status) in enumerate(ends, 1):
        leave(f"lr={lr}", value, status)
    leave("lr=3,seed=1", 0.4, PRUNED, epochs=1)  # seeds count where they have come furthest
    assert [" ".join(line[1:-2]) for line in shown(tmp_path)[1:]] == [
        "0.9000 pruned after 2 of 9 epochs",
        "0.5000 completed",
        "0.8000 0 of 2 completed",
        "failed",
    ]


def test_runs_of_other_code_than_todays_are_stale(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_stale_model.py").write_text("class Net: pass\n")
    targets = ("my_stale_model.Net",)
    config: Any = {"model": {"name": "_target_", "target": targets[0]}}
    then: Any = {"data": None, "code": own_code.fingerprint(targets)}
    sweep = tmp_path / "sweep"
    leave_run(sweep, "lr=1", 0.5, config=config, content=then)
    leave_run(
        sweep, "lr=2", 0.4, config={"model": {"name": "mlp"}}, content={"data": None, "code": None}
    )
    runs = settings.read_runs(sweep)
    assert stale(runs) == []
    (tmp_path / "my_stale_model.py").write_text("class Net: x = 1\n")
    old = stale(runs)
    assert old == [sweep / "lr=1"]
    expected = [["completed,", "stale"], ["completed"]]
    assert [line[2:-2] for line in shown(sweep, stale=old)[1:]] == expected
    out = io.StringIO()
    print_stale(Console(file=out, width=300), old)
    assert f"python -m expt rerun {sweep / 'lr=1'}" in out.getvalue()
    print_stale(Console(file=out, width=300), [Path(str(number)) for number in range(5)])
    assert [line.split() for line in out.getvalue().splitlines()[-4:-1]] == [
        ["python", "-m", "expt", "rerun", str(number)] for number in range(3)
    ]
    assert "2 more" in out.getvalue().splitlines()[-1]
    (tmp_path / "my_stale_model.py").unlink()
    assert stale(runs) == [], "whether it is cannot be said"


def test_of_many_rows_the_best_are_printed(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(leaderboard, "SHOWN", 2)
    for lr in range(1, 6):
        leave_run(tmp_path, f"lr={lr}", lr / 10)
    text = printed(tmp_path, width=80)
    assert [line.split()[0] for line in text.splitlines()] == ["lr", "5", "4", "3"]
    assert "3 more in summary.md" in text
