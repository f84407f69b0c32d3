"""First weights from a run or a file, and parameters that stay as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from expt.errors import ConfigError
from expt.models.partial_load import plain_weights
from expt.runs import checkpoint
from expt.runs.weights_file import weights_file
from expt.worker import first_weights
from tests.conftest import run
from tests.worker.conftest import ALONE, TrainAlone


def net(width: int = 3, outputs: int = 2) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, outputs))


@pytest.mark.parametrize("wrapped", ["plain", "expt", "lightning", "ddp"])
def test_a_whole_file_is_loaded_without_a_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wrapped: str
) -> None:
    saved = net().state_dict()
    content = {"expt": {"model": saved, "epoch": 3}, "lightning": {"state_dict": saved}}.get(wrapped, saved)
    if wrapped == "ddp":
        content = {f"module.{name}": value for name, value in saved.items()}
    torch.save(content, tmp_path / "file.pt")
    module = net()
    first_weights.load(module, str(tmp_path / "file.pt"), ALONE)
    assert all(torch.equal(value, saved[name]) for name, value in module.state_dict().items())
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("wraps", [0, 1])
def test_a_model_may_have_an_attribute_module(wraps: int) -> None:
    state = {"module.weight": torch.ones(2)}
    content = {"module." * wraps + name: value for name, value in state.items()}
    assert plain_weights(content, state.keys()) == state
    assert plain_weights({"ema": {f"module.{name}": value for name, value in state.items()}}, state.keys()) == state


def test_what_does_not_fit_is_told_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = {**net(outputs=5).state_dict(), "old.weight": torch.ones(2)}
    del saved["1.running_mean"]
    torch.save(saved, tmp_path / "file.pt")
    module = net()
    head = module.state_dict()["2.weight"].clone()
    first_weights.load(module, str(tmp_path / "file.pt"), ALONE)
    assert torch.equal(module.state_dict()["0.weight"], saved["0.weight"])
    assert torch.equal(module.state_dict()["2.weight"], head)
    assert capsys.readouterr().err == (
        f"warning: weights={tmp_path / 'file.pt'}: 6 tensors are loaded; 1 missing: 1.running_mean; "
        "1 unexpected: old.weight; 2 of another shape: 2.weight [5, 3], the model's [2, 3], "
        "2.bias [5], the model's [2]\n"
    )


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"a.weight": torch.ones(1)}, "fits this model nowhere (9 missing: 0.weight, 0.bias, 1.weight, 1.bias and 5"),
        ({"1.num_batches_tracked": torch.tensor(3)}, "fits this model nowhere ("),
        ([1, 2], "holds no state_dict; save it by torch.save(model.state_dict(), FILE)"),
        (Path("object"), "can't be read as weights (UnpicklingError: it is damaged, or holds more than tensors); save"),
        (None, "can't be read as weights ("),
    ],
)
def test_a_file_that_does_not_do_is_refused(tmp_path: Path, content: object, says: str) -> None:
    file = tmp_path / "file.pt"
    torch.save(content, file)
    if content is None:
        file.write_bytes(b"no such thing")
    with pytest.raises(ConfigError) as refused:
        first_weights.load(net(), str(file), ALONE)
    assert str(refused.value).startswith(f"weights={file}: {file} {says}")


def test_a_runs_folder_gives_its_best(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    with pytest.raises(ConfigError, match="has no checkpoint; give a run's folder, a checkpoint, or a file of"):
        weights_file(str(tmp_path / "run"))
    (folder / "last.pt").touch()
    assert weights_file(str(tmp_path / "run")) == folder / "last.pt"
    (folder / "best.pt").touch()
    assert weights_file(str(tmp_path / "run")) == folder / "best.pt"
    with pytest.raises(ConfigError, match="there is no such file or folder"):
        weights_file(str(tmp_path / "nowhere"))


def test_what_is_frozen_stays_as_it_was_loaded_and_a_resume_does_not_load_it_again(
    tmp_path: Path, train_alone: TrainAlone
) -> None:
    few = ("model.hidden=[8]", "epochs=2", "dataset.train_limit=256", "optimizer.weight_decay=0.1")
    train_alone(*few, "epochs=1", name="first")
    best = checkpoint.load(tmp_path / "first/checkpoints/best.pt")["model"]
    (tmp_path / "first/checkpoints/best.pt").rename(tmp_path / "copy.pt")
    words = (*few, f"weights={tmp_path}/copy.pt", "freeze=['^1']")
    straight = train_alone(*words, name="straight")
    trained = checkpoint.load(tmp_path / "straight/checkpoints/last.pt")["model"]
    assert [name for name in best if torch.equal(trained[name], best[name])] == ["1.weight", "1.bias"]
    train_alone(*words, "max_steps=5", name="cut")
    (tmp_path / "copy.pt").unlink()
    cut = train_alone(*words, name="cut", source=tmp_path / "cut/checkpoints/last.pt")
    assert cut.run.history.last["loss/val"] == straight.run.history.last["loss/val"]


def test_a_run_says_where_it_began_and_all_workers_begin_alike(tmp_path: Path) -> None:
    few = ("max_steps=3", "dataset.train_limit=256", "tensorboard.images=false", "-q", "seed=3")
    assert run(*few, "hydra.run.dir=first", cwd=tmp_path).returncode == 0
    more = ("world_size=3", "batch_size=63", "hydra.run.dir=second")
    done = run(*few, "weights=first", "freeze=['3.bias']", *more, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    result = (tmp_path / "second/result.json").read_text()
    assert '"file": "first/checkpoints/best.pt"' in result
    for word, says in (
        ("weights=nowhere", "there is no such file or folder; give"),
        ("freeze=['(']", "is no regular exp"),
    ):
        refused = run(*few, word, cwd=tmp_path)
        assert (refused.returncode, refused.stderr.count("\n")) == (2, 1), refused.stderr
        assert says in refused.stderr


def test_of_a_run_with_a_moving_average_it_is_the_average_that_counts(tmp_path: Path) -> None:
    trained, average = net().state_dict(), net().state_dict()
    of_average = {"n_averaged": torch.tensor(3), **{f"module.{name}": value for name, value in average.items()}}
    torch.save({"model": trained, "ema": of_average, "epoch": 3}, tmp_path / "best.pt")
    module = net()
    first_weights.load(module, str(tmp_path / "best.pt"), ALONE)
    assert all(torch.equal(value, average[name]) for name, value in module.state_dict().items())
    assert not torch.equal(trained["0.weight"], average["0.weight"])
