"""First weights from a run or a file, and parameters that stay as they are."""

import argparse
import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from expt.data.build import DataInfo
from expt.errors import ConfigError, DataError
from expt.features import Anything, Classes, Columns, Features
from expt.models.partial_load import weights_in
from expt.runs import checkpoint, checkpoint_file
from expt.runs.paths import RunPaths
from expt.runs.result import create_result
from expt.worker import first_weights
from expt.worker.first_weights import refuse_other
from expt.worker.run import Run
from tests.conftest import Configured
from tests.facade import Capture, RunFolder, request_of, run
from tests.worker import test_divergence
from tests.worker.conftest import ALONE, TrainAlone
from tests.worker.sharded import Observer


def net(width: int = 3, outputs: int = 2) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, outputs))


SAVED = net().state_dict()


@pytest.mark.parametrize(
    "content",
    [
        SAVED,
        {"model": SAVED, "epoch": 3},
        {"model": SAVED, "args": argparse.Namespace(lr=0.1, device="cuda")},
        {"state_dict": SAVED, "hyper_parameters": {"lr": 0.1}},
        {"epoch": 1, "model_state_dict": SAVED, "optimizer_state_dict": {"state": {}}},
        {"checkpoint": {"net": {"weights": SAVED}}},
        {"model": SAVED, "ema": {"decay": 0.99, "shadow_params": [*SAVED.values()]}},
        {"model": {"0.weight": SAVED["0.weight"]}, "params": SAVED},
        {f"{name[0]}._orig_mod{name[1:]}": value for name, value in SAVED.items()},
        *(
            {f"{prefix}{name}": value for name, value in SAVED.items()}
            for prefix in ("module.", "_orig_mod.module.", "module.module.", "model.backbone.")
        ),
    ],
    ids=lambda content: next(reversed(content)),
)
def test_whole_file_loads_silently(tmp_path: Path, capsys: Capture, content: object) -> None:
    torch.save(content, tmp_path / "file.pt")
    module = net()
    first_weights.load_weights(module, str(tmp_path / "file.pt"), ALONE)
    assert all(torch.equal(value, SAVED[name]) for name, value in module.state_dict().items())
    assert capsys.readouterr().err == ""


def test_of_two_that_fit_it_is_told_which_is_loaded(tmp_path: Path, capsys: Capture) -> None:
    average = {f"ema_model.{name}": value for name, value in net().state_dict().items()}
    torch.save({"model": SAVED, "ema": average}, tmp_path / "file.pt")
    module = net()
    first_weights.load_weights(module, str(tmp_path / "file.pt"), ALONE)
    assert torch.equal(module.state_dict()["0.weight"], average["ema_model.0.weight"])
    assert "ema is loaded, and not model" in capsys.readouterr().err


def test_what_training_keeps_by_the_names_of_parameters_is_not_taken_for_weights() -> None:
    other = net().state_dict()
    kept = {"optimizer": {"exp_avg": other, "ema": other}, "grads": other}
    of_run = {"position": {}, "callbacks": [{"ema": other}], "workers": [{"task": other}]}
    for content in ({**kept, "model": SAVED}, {**of_run, "model": SAVED}):
        found = weights_in(content, SAVED.keys())[0]
        assert (found.key, found.state) == ("model", SAVED)


def test_layers_without_weights_do_not_change_which_tensor_is_whose(tmp_path: Path) -> None:
    def layers(*between: nn.Module, outputs: int = 2) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3), *between, nn.Sequential(nn.Linear(3, outputs)))

    trained = layers(nn.ReLU(), nn.Dropout()).state_dict()
    torch.save(trained, tmp_path / "file.pt")
    for module in (layers(), layers(nn.ReLU(), outputs=5)):
        about, _ = first_weights.load_weights(module, str(tmp_path / "file.pt"), ALONE)
        one, other = [*module.state_dict().values()], [*trained.values()]
        assert all(map(torch.equal, one[:2], other[:2]))
        assert torch.equal(one[2], other[2]) == (about["left_out"] == [])
    deeper = layers(nn.Linear(3, 3))  # other layers are not counted through
    about, _ = first_weights.load_weights(deeper, str(tmp_path / "file.pt"), ALONE)
    assert len(about["left_out"]) == 4


@pytest.mark.parametrize("wraps", [0, 1])
def test_a_model_may_have_an_attribute_module(wraps: int) -> None:
    state = {"module.weight": torch.ones(2)}
    content = {"module." * wraps + name: value for name, value in state.items()}
    assert weights_in(content, state.keys())[0].state == state
    average = {"ema": {f"module.{name}": value for name, value in state.items()}}
    assert weights_in([state, {}], state.keys())[0].state == state
    assert weights_in(average, state.keys())[0].state == state


def test_what_does_not_fit_is_told_in_a_line(tmp_path: Path, capsys: Capture) -> None:
    saved = {**net(outputs=5).state_dict(), "old.weight": torch.ones(2)}
    del saved["1.running_mean"]
    torch.save(saved, tmp_path / "file.pt")
    module = net()
    head = module.state_dict()["2.weight"].clone()
    first_weights.load_weights(module, str(tmp_path / "file.pt"), ALONE)
    assert torch.equal(module.state_dict()["0.weight"], saved["0.weight"])
    assert torch.equal(module.state_dict()["2.weight"], head)
    assert (
        capsys.readouterr().err
        == f"warning: weights={tmp_path / 'file.pt'}: loaded 6 of 9 tensors; 1 missing:"
        " 1.running_mean; 1 unexpected: old.weight; 2 of another shape: 2.weight [5, 3], the"
        " model's [2, 3], 2.bias [5], the model's [2]\n"
    )


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            {"a.weight": torch.ones(1)},
            "fits this model nowhere (9 missing: 0.weight, 0.bias, 1.weight, 1.bias and 5",
        ),
        ({"1.num_batches_tracked": torch.tensor(3)}, "fits this model nowhere ("),
        ([1, 2], "holds no state_dict; save it by torch.save(model.state_dict(), FILE)"),
        (
            Path("object"),
            (
                "can't be read as weights (UnpicklingError: it holds pathlib.PosixPath, and not"
                " only tensors); save"
            ),
        ),
        (nn.ReLU(), "can't be read as weights (UnpicklingError: it holds torch.nn.modules"),
        (None, "can't be read as weights ("),
        ({**net().state_dict(), "0.bias": torch.full((3,), math.nan)}, "has integers"),
        ({**net().state_dict(), "0.bias": torch.ones(3, dtype=torch.int8)}, "has integers"),
    ],
)
def test_a_file_that_does_not_do_is_refused(tmp_path: Path, content: object, says: str) -> None:
    file = tmp_path / "file.pt"
    torch.save(content, file)
    if content is None:
        file.write_bytes(b"no such thing")
    with pytest.raises(ConfigError) as refused:
        first_weights.load_weights(net(), str(file), ALONE)
    assert str(refused.value).startswith(f"weights={file}: {file} {says}")


@pytest.mark.parametrize("what", ["the file", "a part"])
def test_weights_that_are_no_longer_what_was_written_are_refused(tmp_path: Path, what: str) -> None:
    """Bits that have flipped, and a part of an older save, are tensors like any other."""
    path = tmp_path / "best.safetensors"
    state = {"model": net().state_dict(), "position": {}, "config": {}}
    if what == "a part":
        (folder := tmp_path / "step-2.parts").mkdir()
        (folder / "0.distcp").write_bytes(b"of step 2")
        checkpoint.save(path, {**state, checkpoint_file.PARTS: checkpoint_file.parts_in(folder)})
        (folder / "0.distcp").write_bytes(b"of step 1")
    else:
        checkpoint.save(path, state)
        content = bytearray(path.read_bytes())
        weight = state["model"]["2.weight"].numpy().tobytes()
        content[content.index(weight)] ^= 1
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"^weights=.*best.safetensors: .*damaged"):
        first_weights.load_weights(net(), str(path), ALONE)


def test_weights_of_another_model_name_it(tmp_path: Path) -> None:
    path = tmp_path / "best.safetensors"
    config = {"model": {"name": "unet", "widths": [8]}}
    state = {"a.weight": torch.ones(1)}
    checkpoint.save(path, {"model": state, "position": {}, "config": config})
    with pytest.raises(ConfigError, match=r"nowhere .*; it is of model=unet"):
        first_weights.load_weights(net(), str(path), ALONE)


def test_frozen_parameters_stay_also_when_resumed(tmp_path: Path, train_alone: TrainAlone) -> None:
    few = ("model.hidden=[8]", "epochs=2", "dataset.train_limit=256", "optimizer.weight_decay=0.1")
    train_alone(*few, "epochs=1", name="first")
    best = checkpoint.load(tmp_path / "first/checkpoints/best.safetensors")["model"]
    (tmp_path / "first/checkpoints/best.safetensors").rename(tmp_path / "copy.safetensors")
    words = (*few, f"weights={tmp_path}/copy.safetensors", "freeze=['^1']")
    straight = train_alone(*words, name="straight")
    trained = checkpoint.load(tmp_path / "straight/checkpoints/last.safetensors")["model"]
    expected = ["1.weight", "1.bias"]
    assert [name for name in best if torch.equal(trained[name], best[name])] == expected
    train_alone(*words, "max_steps=5", name="cut")
    (tmp_path / "copy.safetensors").unlink()
    cut = train_alone(*words, name="cut", source=tmp_path / "cut/checkpoints/last.safetensors")
    assert cut.run.history.last["loss/val"] == straight.run.history.last["loss/val"]


def test_a_run_says_where_it_began_and_all_workers_begin_alike(tmp_path: Path) -> None:
    few = ("max_steps=3", "dataset.train_limit=256", "tensorboard.images=false", "-q", "seed=3")
    assert run(*few, "hydra.run.dir=first", cwd=tmp_path).returncode == 0
    more = ("world_size=3", "batch_size=63", "hydra.run.dir=second")
    done = run(*few, "weights=first", "freeze=['3.bias']", *more, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    first, second = (RunFolder(tmp_path / name).result for name in ("first", "second"))
    assert second["weights_from"] == {
        "file": "first/checkpoints/best.safetensors",
        "run": str(tmp_path / "first"),
        "which": "best",
        "identity": first["identity"],
        "checksum": second["content"]["weights"],
        "epoch": 1,
        "average": False,
        "left_out": [],
    }
    for word, says in (
        ("weights=nowhere", "there is no such file or folder; give"),
        ("freeze=['(']", "is not a regular exp"),
    ):
        refused = run(*few, word, cwd=tmp_path)
        assert (refused.returncode, refused.stderr.count("\n")) == (2, 1), refused.stderr
        assert says in refused.stderr


FEW = ("dataset.train_limit=256", "batch_size=32", "tensorboard.images=false")
OTHER_HEAD = ("dataset=synthetic", "dataset.num_classes=4", "dataset.image_size=[8,8]",
    "dataset.channels=1",
              "dataset.train_size=320", "dataset.test_size=64")  # fmt: skip


@pytest.mark.parametrize("which", ["best", "last"])
def test_other_data_and_another_head_begin_with_the_runs_tensors(
    which: str, tmp_path: Path, train_alone: TrainAlone, capsys: Capture
) -> None:
    average = which == "last"
    net = ("model=convnet", "model.batch_norm=false", "model.dropout=0")
    more = ("ema=0.7",) if average else ()
    train_alone(*net, *FEW, *more, "epochs=2", name="source")
    if not average:
        (tmp_path / "source/checkpoints/last.safetensors").unlink()
    saved = checkpoint.load(tmp_path / f"source/checkpoints/{which}.safetensors")
    theirs = {
        name.removeprefix("module."): value
        for name, value in saved["ema" if average else "model"].items()
        if name != "n_averaged"
    }
    began: dict[str, torch.Tensor] = {}

    def look(*built: Any) -> Observer:
        began.update(
            (name, value.cpu().clone()) for name, value in built[3].module.state_dict().items()
        )
        return Observer()

    create_result(RunPaths(tmp_path / "tuned"))
    words = (*net, *FEW[1:], *OTHER_HEAD, "max_steps=1", f"weights={tmp_path}/source@{which}")
    tuned = train_alone(*words, name="tuned", observe=look)
    fresh = Run(request_of(tuned.run.config, tmp_path / "fresh"), ALONE).learner.module.state_dict()
    head = [name for name, value in theirs.items() if value.shape != began[name].shape]
    assert len(head) == 2
    for name, value in began.items():
        assert torch.equal(value, fresh[name].cpu() if name in head else theirs[name]), name
    told = tuned.result["weights_from"]
    epoch = saved["position"]["epoch"]
    assert (told["average"], told["epoch"], told["left_out"]) == (average, epoch, head)
    first, second = capsys.readouterr().err.splitlines()[-2:]
    assert f"2 of another shape: {head[0]} [10, " in first
    assert (
        second == f"warning: weights={tmp_path}/source@{which}: the weights were trained with"
        " dataset.mean=[0.3053] dataset.std=[0.376], and this run has dataset.mean=null"
        " dataset.std=null"
    )


@pytest.mark.parametrize(
    ("then", "now", "warns"),
    [
        (("cat", "dog"), ("owl", "elk"), True),
        (("cat", "dog"), ("dog", "cat"), True),
        (("cat", "dog"), ("cat", "dog"), False),
        (("cat", "dog"), ("cat", "dog", "elk"), False),  # another shape, which is told
    ],
)
@pytest.mark.parametrize("key", ["columns", "classes"])
def test_what_was_learned_under_other_names_is_told(
    then: tuple[str, ...],
    now: tuple[str, ...],
    warns: bool,
    key: str,
    configured: Configured,
    tmp_path: Path,
    capsys: Capture,
) -> None:
    data = [
        Features(
            Columns(names=names if key == "columns" else ("a", "b"), width=2),
            Classes(names=names if key == "classes" else ("c", "d")),
        ).record
        for names in (then, now)
    ]
    state = {"model": SAVED, "position": {}, "config": {}, "data": data[0]}
    checkpoint.save(tmp_path / "best.safetensors", state)
    config = configured(f"weights={tmp_path}/best.safetensors")
    first_weights.begin_with(config, net(), ALONE, data[1])
    assert (f"the {key} {then[0]}" in capsys.readouterr().err) == warns


def test_the_parts_of_a_forks_other_run_go_with_its_checkpoint(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.checkpoints.mkdir()
    for file, folder in ((paths.forked, "step-19.parts"), (paths.last, "step-38.parts")):
        (paths.checkpoints / folder).mkdir()
        parts = {checkpoint_file.PARTS: {"folder": folder, "files": {}}}
        checkpoint.save(file, {"position": {}, "config": {}, **parts})
    first_weights.release_fork(paths, ALONE)
    assert {*paths.checkpoints.iterdir()} == {paths.last, paths.checkpoints / "step-38.parts"}


def words(size: int) -> tuple[str, ...]:
    own = (
        f"+dataset={{_target_: {test_divergence.__name__}.Holes, bad: [], num_workers: 0, size:"
        f" {size}}}"
    )
    model = ("task=regression", "model=mlp", "model.hidden=[]", "batch_size=8", "drop_last=false")
    return ("~dataset", own, *model, "epochs=2")


def test_a_run_does_not_go_on_with_it(train_alone: TrainAlone) -> None:
    last = train_alone(*words(44), "epochs=1").paths.last

    def refused(size: int) -> str:
        with pytest.raises(DataError) as raised:
            train_alone(*words(size), source=last, name="refused")
        return str(raised.value)

    sizes = {"train": (49, 40), "val": (5, 4), "test": (54, 44)}
    found = (f"{has} samples of {one}, and had {had}" for one, (has, had) in sizes.items())
    assert f"it has {', '.join(found)}; " in refused(54)
    assert train_alone(*words(44), source=last, name="goes on").status == "completed"


def test_a_fork_may_have_fewer_to_train_on_alone(configured: Configured, tmp_path: Path) -> None:
    config = dataclasses.replace(configured(*words(44)), fork=str(tmp_path))
    saved: dict[str, Any] = {"config": {"dataset": {"train_limit": None}}, "steps_per_epoch": 3}
    saved["sizes"] = {"train_size": 40, "val_size": 4, "test_size": 44}
    info = DataInfo(
        features=Features(Anything(), Anything()), train_size=40, val_size=4, test_size=44
    )
    refuse_other(config, info, saved)
    other = dataclasses.replace(info, train_size=20)
    with pytest.raises(
        DataError, match=r"has 20 samples of train, and had 40; .*weights=RUN@last$"
    ):
        refuse_other(config, other, saved)
    limited = dataclasses.replace(
        config, dataset=dataclasses.replace(config.dataset, train_limit=20)
    )
    refuse_other(limited, other, saved)
    with pytest.raises(DataError, match="it has 43 samples of test, and had 44; "):
        refuse_other(limited, dataclasses.replace(other, test_size=43), saved)
    saved["config"]["fork"] = str(tmp_path)  # that is its own checkpoint
    with pytest.raises(DataError, match="start a new run"):
        refuse_other(limited, other, saved)
