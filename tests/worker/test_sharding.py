"""fsdp and hsdp: the numbers of ddp on any workers, and checkpoints for either."""

import functools
import os
import signal
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from expt.config.schema import RunConfig
from expt.dashboards.events import records
from expt.errors import CheckpointError, ConfigError
from expt.inference.load import load
from expt.runs import checkpoint, checkpoint_file, tags
from expt.runs.paths import RunPaths
from expt.training import sharding
from expt.training.callback import Callback, View
from expt.training.collectives import Worker
from expt.worker import fault, first_weights
from tests import ranks
from tests.facade import Patch, RunFolder, as_typed, begun, continued, resumed
from tests.ranks import together
from tests.worker.conftest import ALONE, assert_same
from tests.worker.odd_models import Apart, Centred, Mixture
from tests.worker.sharded import Configs, apart, losses, trained

pytestmark = pytest.mark.usefixtures("not_compared")

SMALL = ("epochs=1", "dataset.train_limit=136", "drop_last=false", "log_every=1", "batch_size=64")
"""Three steps, of which the last has eight samples; 144 are evaluated, the last worker's share
being smaller.
"""
UNEQUAL = ("dataset.train_limit=133", "gradient_accumulation=4")
"""The last step has five samples, of which workers have two and one, or three and two."""
TEXT = as_typed("dataset=text task=language_model dataset.root=text.txt dataset.context=8")
CASES: dict[str, tuple[str, ...]] = {
    "mlp": (
        *as_typed("model=mlp optimizer=adamw ema=0.9 gradient_clip=0.5"),
        *as_typed("tensorboard.histograms=true"),
        *UNEQUAL,
    ),
    "parts": as_typed("model=mlp gradient_accumulation=2 gradient_clip_value=0.01 on_nan=skip"),
    "each part": as_typed(
        "model=mlp gradient_accumulation=2 sharding.reduce_each_part=true sharding.wrap=300"
    ),
    "convnet": as_typed("model=convnet model.dropout=0 batch_norm=sync optimizer.lr=0.01"),
    "transformer": (
        *as_typed("model=transformer model.width=16 model.heads=2 model.layers=2 max_steps=3"),
        *as_typed("epochs=1 optimizer=adamw log_every=1 batch_size=64"),
        *TEXT,
        "sharding.wrap=['blocks\\..','norm']",
    ),
}


SIZES = dict(zip(CASES, (2, 2, 4, 2, 2), strict=True))
for _name in ("mlp", "transformer"):
    CASES[f"{_name} of 4"], SIZES[f"{_name} of 4"] = CASES[_name], 4
RARE = [name for name in CASES if name != "mlp"]


@pytest.mark.parametrize("names", [["mlp"], pytest.param(RARE, marks=pytest.mark.slow)], ids=str)
def test_curves_are_those_of_ddp(names: list[str], configs: Configs, tmp_path: Path) -> None:
    kinds: dict[str, tuple[tuple[str, int], ...]] = {
        name: (("ddp", 1), ("fsdp", SIZES[name])) for name in names
    }
    if "mlp" in kinds:
        kinds["mlp"] = (("ddp", 1), ("hsdp", 4))

    def words_of(name: str, strategy: str) -> tuple[str, ...]:
        settings = CASES[name] if "epochs=1" in CASES[name] else (*SMALL, *CASES[name])
        settings = (*settings, "drop_last=true") if name == "convnet" else settings
        return (*settings, "sharding.shards=2") if strategy == "hsdp" else settings

    for size in (1, 2, 4):
        wanted = {
            f"{name}, {strategy} {size}": configs(strategy, size, *words_of(name, strategy))
            for name in names
            for strategy, number in kinds[name]
            if number == size
        }

        def each(worker: Worker, wanted: dict[str, RunConfig] = wanted) -> list[str]:
            return [trained(tmp_path / name, config, worker) for name, config in wanted.items()]

        if wanted:
            together(tmp_path, size, each)
    for name in names:
        for strategy, size in kinds[name][1:]:
            assert (
                apart(tmp_path / f"{name}, {strategy} {size}", tmp_path / f"{name}, ddp 1") < 1e-4
            ), (name, strategy)
    if "mlp" in kinds:
        whole, in_parts = (norms(tmp_path / f"mlp, {kind}") for kind in ("ddp 1", "hsdp 4"))
        assert len(whole) == 4
        assert in_parts == pytest.approx(whole, rel=1e-4)


def test_statistics_of_groups_are_those_of_ddp(configs: Configs, tmp_path: Path) -> None:
    """Averaged over workers after each step, also those of a layer that is gathered by itself."""
    words = (
        *as_typed("model=convnet model.dropout=0 batch_norm=groups batch_norm_group=16"),
        *as_typed("epochs=1 dataset.train_limit=150 drop_last=false log_every=1 batch_size=64"),
    )
    wanted = {
        name: configs(name, 2, *words, *more)
        for name, more in {"ddp": (), "fsdp": ("sharding.wrap=['.*']",)}.items()
    }

    def each(worker: Worker) -> list[str]:
        return [trained(tmp_path / name, config, worker) for name, config in wanted.items()]

    together(tmp_path, 2, each)
    assert apart(tmp_path / "fsdp", tmp_path / "ddp") < 1e-4
    found, expected = (RunFolder(tmp_path / name).state()["model"] for name in ("fsdp", "ddp"))
    statistics = [name for name in expected if "running" in name]
    assert statistics
    for name in statistics:
        assert torch.allclose(found[name], expected[name], atol=1e-5), name


def norms(folder: Path) -> dict[str, float]:
    """Of each layer's weights and gradients, in all epochs."""
    return {
        f"{value.tag} {event.step}": value.simple_value
        for event, _ in records(RunPaths(folder).event_files())
        for value in event.summary.value
        if value.tag.startswith((tags.GRADIENT_NORM, tags.WEIGHT_NORM))
    }


LONG = (
    *as_typed("model=mlp model.dropout=0.3 optimizer=adamw ema=0.9 log_every=1"),
    *as_typed("dataset.train_limit=320"),
)
OFTEN = ("epochs=3", "checkpoint.every_steps=2")


@pytest.mark.slow
@pytest.mark.parametrize("sharded", ["true", "false"])
def test_killed_runs_go_on_to_the_same_bits(sharded: str, configs: Configs, tmp_path: Path) -> None:
    config = configs("fsdp", 2, *LONG, *OFTEN, f"checkpoint.sharded={sharded}")

    def killed(worker: Worker) -> None:
        patch = pytest.MonkeyPatch()  # of this process alone, which is to die
        patch.setenv(fault.VARIABLE, f"{worker.rank}:9:kill")
        trained(tmp_path / "killed", config, worker)

    assert ranks.ends_of(tmp_path, 2, killed) == [-signal.SIGKILL] * 2
    last = RunPaths(tmp_path / "killed").last
    checkpoint_file.check(last)

    def whole_and_resumed(worker: Worker) -> list[str]:
        return [
            trained(tmp_path / "whole", config, worker),
            trained(tmp_path / "killed", config, worker, last),
        ]

    together(tmp_path, 2, whole_and_resumed)
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    states = [checkpoint.load(RunPaths(tmp_path / name).last) for name in ("killed", "whole")]
    for key in ("model", "ema"):
        assert all(
            torch.equal(states[0][key][name], values) for name, values in states[1][key].items()
        )
    assert all(
        torch.equal(states[0]["optimizer"]["state"][index]["exp_avg_sq"], slots["exp_avg_sq"])
        for index, slots in states[1]["optimizer"]["state"].items()
    )


STRETCHES = (
    ("ddp", 2, "false"), ("fsdp", 4, "true"), ("hsdp", 4, "false"), ("fsdp", 2, "true"),
    ("ddp", 2, "false"),
)  # fmt: skip


@pytest.mark.slow
def test_resume_with_another_strategy_and_size(configs: Configs, tmp_path: Path) -> None:
    settings = (*(word for word in LONG if "dropout" not in word), "tensorboard.health=true")
    source = None
    for number, (strategy, size, sharded) in enumerate(STRETCHES, 1):
        groups = ("sharding.shards=2",) if strategy == "hsdp" else ()
        config = configs(
            strategy, size, *settings, f"epochs={number}", f"checkpoint.sharded={sharded}", *groups
        )
        folder, begun = tmp_path / str(number), source
        folder.mkdir()
        if begun is not None:
            begun = resumed(begun, folder)
        together(
            tmp_path,
            size,
            lambda worker, c=config, f=folder, b=begun: trained(f, c, worker, b),  # type: ignore[misc]
        )
        source = RunPaths(folder).last
    config = configs("ddp", 1, *settings, f"epochs={len(STRETCHES)}")
    together(tmp_path, 1, lambda worker: trained(tmp_path / "ddp", config, worker))
    assert apart(tmp_path / str(len(STRETCHES)), tmp_path / "ddp") < 1e-5
    for number, (strategy, _, sharded) in enumerate(STRETCHES, 1):
        state = checkpoint_file.read(RunPaths(tmp_path / str(number)).last)
        assert bool(state.get("parts")) == (sharded == "true"), number
        measured = [
            step for step, _ in RunFolder(tmp_path / str(number)).curve("ranks/all_reduce_share")
        ]
        assert measured == [
            5 * epoch for epoch, (name, *_) in enumerate(STRETCHES[:number], 1) if name == "ddp"
        ]
        assert ("ranks/all_reduce_share" in state["last"]) == (strategy == "ddp"), "of this stretch"


class Weighs(Callback):
    """Notes what the model weighs, and that it gives something."""

    def on_evaluation_end(self, view: View) -> None:
        with torch.no_grad():
            device = next(view.model.parameters()).device
            outputs = view.model(torch.ones(2, 1, 8, 8, device=device)).sum().item()
        view.scalar(f"mine/outputs_{view.split}", outputs)


@pytest.mark.slow
def test_whole_model_is_shown(configs: Configs, tmp_path: Path, monkeypatch: Patch) -> None:
    own = "callbacks=[{_target_: tests.worker.test_sharding.Weighs}]"
    settings = (*SMALL, "model=mlp", "ema=0.5", own, "tensorboard.histograms=true")
    first = configs("fsdp", 2, *settings, "checkpoint.sharded=true")
    further = configs("fsdp", 2, *settings, f"weights={tmp_path / 'first'}")
    alone = configs("ddp", 2, *settings, f"weights={tmp_path / 'first'}")

    def each(worker: Worker) -> None:
        trained(tmp_path / "first", first, worker)
        trained(tmp_path / "further", further, worker)
        trained(tmp_path / "alone", alone, worker)

    together(tmp_path, 2, each)
    for tag in ("mine/outputs_val", "mine/outputs_test", "loss/val"):
        (_, found), (_, expected) = (
            RunFolder(tmp_path / name).curve(tag)[-1] for name in ("further", "alone")
        )
        assert found == pytest.approx(expected, abs=1e-5), tag
    paths = RunPaths(tmp_path / "first")
    (_, outputs), model = RunFolder(paths.folder).curve("mine/outputs_test")[-1], load(paths.folder)
    assert model(torch.ones(2, 1, 8, 8)).sum().item() == pytest.approx(outputs, abs=1e-5)
    state = checkpoint.load(paths.best)
    assert all(isinstance(values, torch.Tensor) for values in state["model"].values())
    monkeypatch.setattr(checkpoint, "available_memory", lambda: 1000)
    with pytest.raises(
        CheckpointError,
        match=r"is sharded, and its whole tensors need more than the 0\.0 GB that this",
    ):
        load(paths.folder)
    with pytest.raises(
        ConfigError, match=rf"weights={paths.folder}: .*best.safetensors: is sharded, and its whole"
    ):
        first_weights.load_weights(torch.nn.Linear(1, 1), str(paths.folder), ALONE)
    monkeypatch.undo()
    (lost := sorted((paths.checkpoints).glob("*.parts/*.distcp"))[0]).write_bytes(b"")
    with pytest.raises(
        CheckpointError, match=rf"{lost.name}, a part of it, is truncated or damaged"
    ):
        checkpoint_file.check(paths.best)
    with pytest.raises(CheckpointError, match=r"step-\d+.parts can't be read \("):
        checkpoint.load(paths.best)
    lost.unlink()
    with pytest.raises(CheckpointError, match=rf"{lost.name} is missing, which holds a part of it"):
        checkpoint.load(paths.best)


FIND = "ddp.find_unused_parameters=true"
SHORT = as_typed(
    "epochs=1 max_steps=6 log_every=1 dataset.train_limit=128 optimizer=adamw optimizer.lr=0.02"
)


def of(model: type[nn.Module]) -> tuple[str, ...]:
    return ("~model", f"+model._target_={model.__module__}.{model.__name__}")


def by_both(root: Path, configs: Configs, size: int, *words: str) -> tuple[Path, Path]:
    """The folders of a run by ddp and of one by fsdp."""
    wanted = {
        root / "ddp": configs("ddp", size, *words),
        root / "fsdp": configs("fsdp", size, *(word for word in words if word != FIND)),
    }
    ends = [["completed"] * 2] * size
    assert (
        together(root, size, lambda rank: [trained(*one, rank) for one in wanted.items()]) == ends
    )
    return root / "ddp", root / "fsdp"


def weights(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = checkpoint.load(RunPaths(folder).last)["model"]
    return found


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("parts", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_unused_experts_as_ddp(size: int, parts: int, configs: Configs, tmp_path: Path) -> None:
    """Let workers see few experts each; parameters that none used do not decay."""
    words = (
        *of(Mixture),
        *SHORT,
        f"batch_size={4 * parts}",
        f"gradient_accumulation={parts}",
        "optimizer.weight_decay=0.5",
    )
    plain, found = by_both(tmp_path, configs, size, *words, FIND)
    assert apart(plain, found) < 1e-5
    begun, there = weights(plain), weights(found)
    assert all(torch.allclose(begun[name], there[name], atol=1e-5) for name in begun)


def refused(folder: Path, config: RunConfig, worker: Worker) -> str:
    os.environ["RANK"] = str(worker.rank)
    try:
        return trained(folder, config, worker)
    except (ConfigError, RuntimeError) as error:
        return str(error)


def test_workers_that_call_other_layers_are_refused(configs: Configs, tmp_path: Path) -> None:
    """All are of one size: each worker would compute with a mixture of two."""
    words = *of(Apart), *SHORT, "batch_size=16", "sharding.wrap=[blocks.0,blocks.1]"
    each = functools.partial(refused, tmp_path / "run", configs("fsdp", 2, *words))
    assert all("sharding.wrap" in text for text in together(tmp_path, 2, each))


@pytest.mark.cpu("NCCL waits for a worker that has ended")
def test_old_torch_without_zeros(configs: Configs, tmp_path: Path, monkeypatch: Patch) -> None:
    """Not where all have used all, or nobody: that it can do."""

    class Older(sharding.Unused):
        def drop(self) -> None:
            self._gives_zeros = False
            self._used = {
                name for name in self._parameters if "last" in name or int(os.environ["RANK"])
            }
            super().drop()

    monkeypatch.setattr(sharding, "Unused", Older)
    config = configs("fsdp", 2, *of(Centred), *SHORT, "batch_size=16")
    told, _ = together(tmp_path, 2, functools.partial(refused, tmp_path / "run", config))
    assert told.startswith("the parameter body.weight was used by some workers only in a step")


THREE_STEPS = (
    *as_typed("dataset.train_limit=136 drop_last=false log_every=1 batch_size=64"),
    *as_typed("optimizer=adamw"),
)
"""Three steps in an epoch."""
DRAWING = (
    *as_typed("model.dropout=0.3 ema=0.9 mixup=0.2"),
    "early_stop={metric: loss/val, patience: 9}",
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["true", "false"], ids=["parts", "one file"])
def test_pruned_or_longer_sharded_run_is_exact(kind: str, configs: Configs, tmp_path: Path) -> None:
    words = (*THREE_STEPS, *DRAWING, f"checkpoint.sharded={kind}")
    whole, within = (
        configs("fsdp", 2, *words, "epochs=3"),
        configs("fsdp", 2, *words, "max_steps=4"),
    )

    def begin(worker: Worker) -> list[str]:
        return [
            trained(tmp_path / "whole", whole, worker),
            trained(tmp_path / "pruned", whole, worker, until_epoch=1),
            trained(tmp_path / "longer", within, worker),
        ]

    assert together(tmp_path, 2, begin) == [["completed", "pruned", "completed"]] * 2
    sources: dict[str, Path] = {}
    for name in ("pruned", "longer"):
        paths = RunPaths(tmp_path / name)
        parted = bool(paths.parts)
        source = continued(whole, paths)
        assert source == (paths.last if name == "pruned" else paths.before_end)
        assert parted == (kind == "true")
        sources[name] = source

    def go_on(worker: Worker) -> list[str]:
        return [trained(tmp_path / name, whole, worker, source) for name, source in sources.items()]

    assert together(tmp_path, 2, go_on) == [["completed"] * 2] * 2
    for name in sources:
        assert_same(*(RunFolder(tmp_path / each) for each in (name, "whole")))


FORKS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # what the other run had, and what the fork has besides
    "parameters in other groups, and a first average": (
        ("optimizer=adamw",), ("optimizer=adamw", "optimizer.decay_biases_and_norms=false",
            "ema=0.9")),
    "from Muon, and without the average": (("optimizer=muon", "ema=0.9"), ("optimizer=adamw",
        "ema=null")),
    "plain descent, within an epoch": (("optimizer=sgd", "ema=0.9"), ("optimizer=sgd",
        "optimizer.lr=0.02", "ema=0.9")),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", FORKS)
def test_sharded_fork_equals_ddp_and_parent(name: str, configs: Configs, tmp_path: Path) -> None:
    words = (
        *THREE_STEPS[:-1],
        *as_typed("model.hidden=[16,16] epochs=3 checkpoint.keep=9 checkpoint.every_steps=2"),
    )
    before, now = FORKS[name]
    strategy = "ddp" if "optimizer=muon" in before else "fsdp"
    parent = configs(strategy, 2, *words, *before, "checkpoint.sharded=true")
    begun(parent, tmp_path / "parent")
    together(tmp_path, 2, lambda worker: trained(tmp_path / "parent", parent, worker))

    def fork(strategy: str, name: str, *more: str) -> tuple[str, RunConfig, Path | None]:
        step = 4 if "optimizer=sgd" in before else 3
        config = configs(
            strategy, 2, *words, *more, "checkpoint.sharded=true", f"fork=parent@{step}"
        )
        return name, config, begun(config, tmp_path / name)

    forks = [fork(strategy, "same", *before), fork("ddp", "ddp", *now), fork("fsdp", "fsdp", *now)]
    together(
        tmp_path,
        2,
        lambda worker: [trained(tmp_path / name, each, worker, at) for name, each, at in forks],
    )
    assert losses(tmp_path / "same") == losses(tmp_path / "parent")
    assert apart(tmp_path / "fsdp", tmp_path / "ddp") < 1e-5
    left = {path.name for path in RunPaths(tmp_path / "fsdp").checkpoints.iterdir()}
    assert not [file for file in left if file.startswith((".", "fork"))], left
