"""A sweep's runs as a study of Optuna's: which settings mattered, and the journal."""

import json
import math
import random
import warnings
from pathlib import Path
from typing import Any

import pytest

from expt.command.report import main
from expt.errors import ConfigError
from tests.dashboards.folders import record, sweep
from tests.facade import Capture

optuna = pytest.importorskip("optuna")


def grid(folder: Path, number: int, **fields: Any) -> list[dict[str, Any]]:
    """Runs whose accuracy is a matter of the learning rate and hardly of the width."""
    draw, found = random.Random(1), list[dict[str, Any]]()
    sweep(folder)
    for at in range(number):
        lr, width = 10 ** draw.uniform(-4, 0), draw.choice([16, 32, 64])
        value = 1 - abs(math.log10(lr) + 1) / 4 + width / 1e4
        typed = {"optimizer.lr": lr, "model.width": width, "seed": at, "model": "mlp"}
        typed |= {"dropout": at / 100} if at % 3 == 0 else {}
        objective = {"name": "accuracy/val", "value": value}
        more = {"overrides": typed, "objective": objective, "search": {"number": at}, **fields}
        more["config"] = {"model": {"name": "mlp"}, "task": {"name": "classification"}}
        record(folder / f"r{number - at}", status="completed", started=1e9 + at, **more)
        found.append({**typed, "value": value})
    return found


def test_importance_equals_optunas(tmp_path: Path, capsys: Capture) -> None:
    known = grid(tmp_path / "grid", 40)
    main([str(tmp_path / "grid"), "--importance"])
    shown = {
        line.split()[0]: [*map(float, line.split()[1:])]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith(("optimizer.lr", "model.width", "dropout"))
    }
    warnings.simplefilter("ignore")
    study, high, low = optuna.create_study(), max, min
    rates = [each["optimizer.lr"] for each in known]
    space: dict[str, Any] = {
        "optimizer.lr": optuna.distributions.FloatDistribution(low(rates), high(rates), log=True),
        "model.width": optuna.distributions.IntDistribution(16, 64),
        "dropout": optuna.distributions.FloatDistribution(0.0, 0.39),
    }
    for each in known:
        own = {key: value for key, value in each.items() if key in space}
        distributions = {key: space[key] for key in own}
        study.add_trial(
            optuna.trial.create_trial(value=-each["value"], params=own, distributions=distributions)
        )
    evaluators = (
        optuna.importance.PedAnovaImportanceEvaluator(target_quantile=5 / 40),
        optuna.importance.FanovaImportanceEvaluator(seed=0),
    )
    for column, evaluator in enumerate(evaluators):
        wanted = optuna.importance.get_param_importances(study, evaluator=evaluator)
        for key in shown:
            assert shown[key][column] == pytest.approx(wanted.get(key, 0.0), abs=6e-4)
    assert shown.keys() == space.keys()
    assert shown["optimizer.lr"][1] > 0.9


def test_too_few_runs_are_refused_with_their_number(tmp_path: Path) -> None:
    grid(tmp_path / "grid", 9)
    with pytest.raises(ConfigError, match=r"--importance: .*grid has 9 completed runs;.* 10"):
        main([str(tmp_path / "grid"), "--importance"])
    grid(tmp_path / "same", 12, overrides={"seed": 1, "model": "mlp"})
    with pytest.raises(ConfigError, match="12 completed runs of equal settings"):
        main([str(tmp_path / "same"), "--importance"])
    grid(tmp_path / "flat", 12, objective={"name": "loss/val", "value": 0.5})
    with pytest.raises(ConfigError, match="--importance: loss/val"):
        main([str(tmp_path / "flat"), "--importance"])


def test_the_journal_has_every_run_in_the_order_of_the_search(tmp_path: Path) -> None:
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    known, file = grid(tmp_path / "grid", 6), tmp_path / "study.log"
    for name, status in (("r1", "failed"), ("r2", "running"), ("r3", "pruned")):
        path = tmp_path / "grid" / name / "result.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "status": status}))
    (tmp_path / "grid/r6/metrics.jsonl").write_text(
        '{"step": 3, "epoch": 1, "tag": "accuracy/val", "value": 0.5}\n'
    )
    main([str(tmp_path / "grid"), "--optuna", str(file)])
    warnings.simplefilter("ignore")
    storage = JournalStorage(JournalFileBackend(str(file)))
    study = optuna.load_study(study_name="grid", storage=storage)
    assert [trial.state.name for trial in study.trials] == [
        *["COMPLETE"] * 3, "PRUNED", "RUNNING", "FAIL",
    ]  # fmt: skip
    assert [trial.params["optimizer.lr"] for trial in study.trials] == [
        each["optimizer.lr"] for each in known
    ]
    assert study.best_value == max(each["value"] for each in known[:3])
    assert study.trials[0].intermediate_values == {1: 0.5}
    before = file.read_bytes()
    with pytest.raises(ConfigError, match="--optuna"):
        main([str(tmp_path / "grid"), "--optuna", str(file)])
    assert file.read_bytes() == before
