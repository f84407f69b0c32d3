"""A sharded model, and a custom optimizer, train to the weights of a whole one, or are refused."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from expt.config.schema import RunConfig
from expt.errors import ConfigError, RunFailed
from expt.runs.paths import RunPaths
from expt.runs.result import create_result
from expt.training import random_state
from expt.training.collectives import Worker
from expt.worker import comparison
from expt.worker.build import build_data
from expt.worker.diagnosis import in_words
from tests.conftest import Configured
from tests.facade import Capture, Patch, as_typed, same
from tests.ranks import together
from tests.worker.conftest import ALONE, TrainAlone
from tests.worker.sharded import Configs, trained


def test_it_compares_in_full_precision(configured: Configured, monkeypatch: Patch) -> None:
    def flags() -> tuple[str, bool, bool]:
        cudnn = torch.backends.cudnn
        return torch.get_float32_matmul_precision(), cudnn.allow_tf32, cudnn.benchmark

    seen = list[tuple[str, bool, bool]]()

    def choose(*_: object) -> None:
        seen.append(flags())

    monkeypatch.setattr(comparison, "_choose", choose)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    before, config = flags(), configured(*optimizer("ByNorm"))
    assert comparison.compare(config, build_data(config, ALONE), ALONE) == "nothing"
    assert seen == [("highest", False, False)]
    assert flags() == before


KEPT = "after it was saved and loaded; let the optimizer keep all its state in self.state, made"
UNEVEN = ("dataset.train_limit=133", "batch_size=32", "drop_last=false")
EVEN = (*UNEVEN[:2], "drop_last=true")
MODELS, OPTIMIZERS = "tests.worker.odd_models", "tests.worker.odd_optimizers"


def model(name: str, *more: str) -> tuple[str, ...]:
    return (*UNEVEN, "optimizer=adamw", "~model", f"+model._target_={MODELS}.{name}", *more)


def optimizer(target: str, *more: str) -> tuple[str, ...]:
    target = target if "." in target else f"{OPTIMIZERS}.{target}"
    return (*UNEVEN, "model=mlp", *more, f"optimizer={{_target_: {target}}}")


def task(name: str, *words: str) -> tuple[str, ...]:
    return (*words, "model=mlp", f"task={{_target_: {OPTIMIZERS}.{name}}}")


EQUAL: Mapping[str, tuple[str, ...]] = {
    "mlp, average, clip, parts": (
        *(*UNEVEN, "model=mlp", "model.dropout=0.3", "optimizer=adamw", "ema=0.9"),
        *("gradient_clip=0.5", "gradient_accumulation=2", "amp=bf16"),
    ),
    "sgd": (*UNEVEN, "model=mlp", "optimizer=sgd", "checkpoint.sharded=true"),
    "convnet, sync": (*EVEN, "model=convnet", "batch_norm=sync", "optimizer=adam"),
    "transformer": (
        *("model=transformer", "model.width=16", "model.heads=2", "model.layers=2", "dataset=text"),
        *("task=language_model", "dataset.root=text.txt", "dataset.context=8", "batch_size=64"),
        *("optimizer=adamw", "activation_checkpointing=auto"),
    ),
    **{
        name: model(name)
        for name in as_typed("Sequence Tied Plain Unsaved OddMemory Mixture Centred")
    },
    **{
        f"a parameter: {kind}": model("WithParameter", f"+model.kind={kind}")
        for kind in ("double", "few")
    },
    **{name: optimizer(name) for name in as_typed("ByNorm Split Counting torch.optim.RMSprop")},
    "BySize": (*model("Marked"), f"optimizer={{_target_: {OPTIMIZERS}.BySize, lr: 0.1}}"),
    "Penalised, even": task("Penalised", *EVEN),
    "InPlace": task("InPlace", *EVEN),
}
COMMON = {
    *("mlp, average, clip, parts", "transformer", "ByNorm", "Penalised, even"),
    *("a weight in a list", "Clipping", "muon", "a lost buffer"),
}
"""What the fast tests try, of both."""
REFUSED: Mapping[str, tuple[tuple[str, ...], str]] = {
    "a weight in a list": (model("Listed"), "gradient"),
    "a view in evaluations": (model("Viewed"), "output in an evaluation"),
    "a lost buffer": (model("Lost"), "after it was saved and loaded"),
    "a write": (model("Clamped"), "gradient"),
    "a buffer of a weight's memory": (model("Aliased"), "buffer view"),
    "muon": ((*UNEVEN, "model=mlp", "optimizer=muon"), "Muon enlarges the rounding of bfloat16"),
    "ByNumber": (optimizer("ByNumber"), "update of"),
    "Clipping": (optimizer("Clipping"), "update of"),
    "Forgetful": (optimizer("Forgetful"), "update of 1.weight"),
    "Averaging": (optimizer("Averaging"), "after it was saved and loaded; let the optimizer keep"),
    "Penalised, uneven": (task("Penalised", *UNEVEN), "gradient"),
}
FAILS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "a scalar": (model("WithParameter", "+model.kind=scalar"), "doesn't support scalar parameters"),
    "OfRows": (optimizer("OfRows"), "mixed torch.Tensor and DTensor"),
}


def outcome(config: RunConfig, worker: Worker) -> str:
    """Return what was compared, or what was raised."""
    random_state.seed(config.seed)
    data = build_data(config, worker)
    before = random_state.state_dict(worker.device)
    try:
        return str(comparison.compare(config, data, worker))
    except (ConfigError, RunFailed, RuntimeError) as error:
        return f"{type(error).__name__}: {in_words(error, config)}"
    finally:
        assert same(random_state.state_dict(worker.device), before)


def outcomes(folder: Path, wanted: Mapping[str, RunConfig], size: int) -> list[dict[str, str]]:
    """Return what each worker comes to, of each name."""

    def each(worker: Worker) -> dict[str, str]:
        return {name: outcome(config, worker) for name, config in wanted.items()}

    return together(folder, size, each)


BOTH_WAYS = [
    ("fsdp", 2, COMMON),
    *(
        pytest.param(strategy, size, {*EQUAL, *REFUSED}, marks=pytest.mark.slow)
        for strategy, size in (("fsdp", 2), ("hsdp", 4))
    ),
]


@pytest.mark.parametrize(("strategy", "size", "some"), BOTH_WAYS)
def test_what_trains_as_the_whole_is_taken_and_else_refused_on_all_workers(
    strategy: str, size: int, some: set[str], configs: Configs, tmp_path: Path
) -> None:
    more = ("sharding.shards=2",) if strategy == "hsdp" else ()
    cases = {name: words for name, words in EQUAL.items() if name in some}
    refused = {name: case for name, case in REFUSED.items() if name in some}
    cases |= {name: words for name, (words, _) in refused.items()}
    wanted = {name: configs(strategy, size, *words, *more) for name, words in cases.items()}
    for found in outcomes(tmp_path, wanted, size):
        for name, (_, told) in refused.items():
            assert found[name].startswith(f"ConfigError: strategy={strategy}: the "), name
            assert told in found.pop(name), name
        assert {name: told for name, told in found.items() if told != "whole"} == {}


def test_what_torch_cannot_shard_is_said_in_its_words(configs: Configs, tmp_path: Path) -> None:
    wanted = {name: configs("fsdp", 2, *words) for name, (words, _) in FAILS.items()}
    for found in outcomes(tmp_path, wanted, 2):
        for name, (_, told) in FAILS.items():
            assert told in found[name], name


@pytest.mark.slow
def test_samples_come_in_the_models_type(configs: Configs, tmp_path: Path) -> None:
    rows = f"+dataset={{_target_: {MODELS}.Rows, num_classes: 10, num_workers: 0}}"
    words = (*model("Double")[2:], "~dataset", rows, "batch_size=16", "max_steps=1", "epochs=1")
    config = configs("fsdp", 2, *words)
    found = together(tmp_path, 2, lambda worker: trained(tmp_path / "run", config, worker))
    assert found == ["completed"] * 2


def test_sums_are_checked_when_sharded(configs: Configs, tmp_path: Path, capfd: Capture) -> None:
    wanted = {name: configs("fsdp", 2, *task(name, *EVEN)) for name in ("Mean", "Paired")}
    for found in outcomes(tmp_path, wanted, 2):
        assert found["Mean"].startswith("ConfigError: Mean.loss gives a mean")
        assert found["Paired"] == "whole"
    assert capfd.readouterr().err.count("warning: Paired.loss") == 1


def test_custom_optimizers(configured: Configured, configs: Configs, tmp_path: Path) -> None:
    def found(name: str) -> str:
        return outcome(configured(*optimizer(name)), ALONE)

    by_two = {"Split": configs("ddp", 2, *optimizer("Split"))}
    assert outcomes(tmp_path, by_two, 2) == [{"Split": "whole"}] * 2
    assert found("ByNumber") == found("Split") == "whole"
    assert found("torch.optim.RMSprop") == "None"
    for name in ("Forgetful", "Averaging"):
        assert found(name).startswith(f"ConfigError: optimizer._target_={OPTIMIZERS}.{name}: the ")
        assert KEPT in found(name)
    assert KEPT in found("InDouble")


@pytest.mark.cpu("free memory is a GPU's own there")
def test_large_models_in_part(configs: Configs, tmp_path: Path, monkeypatch: Patch) -> None:
    deep = (*UNEVEN, "model=mlp", "model.hidden=[8,8,8,8]")
    wanted = {"deep": configs("fsdp", 2, *deep), "flat": configs("fsdp", 2, *model("Sequence"))}
    monkeypatch.setattr(comparison, "LARGE", 600)
    monkeypatch.setattr(comparison, "available_memory", lambda: 2 * 2 * 4 * 10 * 750)
    assert outcomes(tmp_path, wanted, 2) == [{"deep": "fewer_blocks", "flat": "nothing"}] * 2


def test_a_result_says_what_was_compared(train_alone: TrainAlone, tmp_path: Path) -> None:
    create_result(RunPaths(tmp_path / "run"))
    assert train_alone(*optimizer("Split"), "max_steps=1").result["compared"] == "whole"
