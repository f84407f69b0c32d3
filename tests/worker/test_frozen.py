"""A network that is not trained: read once, part of the identity, and of nothing else."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import expt
from expt.errors import ConfigError
from tests.facade import Patch, RunFolder, as_typed, run, same

OWN = """
import expt
from torch import nn
from torch.nn import functional

class Distilled(expt.Task):
    def __init__(self, teacher, always=False):
        self.teacher, self.always = teacher, always
    def training_loss(self, outputs, batch):
        error = (outputs - self.teacher(batch.inputs)).square().sum()
        return error + self.loss(outputs, batch)[0], len(outputs)
    def loss(self, outputs, batch):
        loss = functional.cross_entropy(outputs, batch.targets, reduction="sum")
        return loss + (self.teacher(batch.inputs).sum() if self.always else 0), len(outputs)

class Both(nn.Module):
    def __init__(self, num_classes, teacher):
        super().__init__()
        self.layer, self.teacher = nn.Linear(num_classes, num_classes), teacher
    def forward(self, images):
        return self.layer(self.teacher(images))

class Cyclic(Both):
    # can't be built without memory, and lives on until it is collected
    def __init__(self, num_classes, teacher):
        super().__init__(num_classes, teacher)
        self.itself, self.first = [lambda: self], float(self.layer.bias[0])

class Making(Distilled):
    def __init__(self, folder):
        super().__init__(expt.Frozen(folder))

class Watching(expt.Callback):
    def __init__(self, net):
        self.net = net
    def on_epoch_end(self, view):
        view.scalar("mine/net", float(self.net(view.model[1].weight.view(-1, 1, 8, 8)).sum()))
"""
NET = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 10))
"""
SMALL = as_typed("dataset.train_limit=64 batch_size=32 world_size=1 tensorboard.images=false")
STUDENT = (
    *("~task", "+task={_target_: own.Distilled, teacher: {_target_: expt.Frozen, weights: RUN}}"),
    *("model.hidden=[4]", "objective=loss/val", "epochs=2", "checkpoint.every_steps=1", *SMALL),
)
Typed = Callable[..., RunFolder]


def words(weights: str, *more: str) -> list[str]:
    return [*(word.replace("RUN", weights) for word in STUDENT), *more]


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with custom classes, and a teacher that is trained."""
    folder = tmp_path_factory.mktemp("taught")
    (folder / "own.py").write_text(OWN)
    done = run("model.hidden=[5]", "max_steps=2", *SMALL, "hydra.run.dir=teacher", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def typed_run(taught: Path, tmp_path: Path) -> Typed:
    """A command that trains in tmp_path; there are a teacher, and custom classes."""
    shutil.copytree(taught, tmp_path, dirs_exist_ok=True)

    def train(name: str, *words: str, **extra: str) -> RunFolder:
        done = run(*words, f"hydra.run.dir={name}", cwd=tmp_path, **extra)
        assert done.returncode == 0, done.stderr
        return RunFolder(tmp_path / name)

    return train


def test_it_is_in_no_checkpoint_and_the_student_needs_it_in_training_only(
    typed_run: Typed, tmp_path: Path
) -> None:
    student = typed_run("student", *words("teacher"))
    state = student.state("best")
    assert {tuple(one.shape) for one in state["model"].values()} == {(4, 64), (4,), (10, 4), (10,)}
    assert len(state["optimizer"]["param_groups"][0]["params"]) == 4
    again = typed_run("again", *words("teacher"), "max_restarts=1", EXPT_FAULT="0:3:kill:once")
    assert again.points == student.points
    assert same(again.state()["model"], student.state()["model"])
    (tmp_path / "teacher").rename(tmp_path / "moved")
    measured = run("evaluate", "student", cwd=tmp_path)
    assert measured.returncode == 0, measured.stderr
    assert expt.load(tmp_path / "student")(torch.zeros(1, 1, 8, 8)).shape == (1, 10)
    assert run("predict", "student", "--split", "test", cwd=tmp_path).returncode == 0
    moved = typed_run("moved_student", *words("moved"))
    assert moved.result["identity"] == student.result["identity"]
    assert moved.points == student.points


@pytest.mark.slow
def test_another_teacher_makes_another_run(typed_run: Typed, tmp_path: Path) -> None:
    student = typed_run("student", *words("teacher"))
    shutil.rmtree(tmp_path / "teacher")
    typed_run("teacher", "model.hidden=[5]", "max_steps=3", *SMALL)
    other = typed_run("other", *words("teacher"))
    assert other.result["identity"] != student.result["identity"]
    assert other.points != student.points
    refused = run(
        *words("teacher", "epochs=3"), "resume=student", "hydra.run.dir=more", cwd=tmp_path
    )
    assert (refused.returncode, "task.teacher.weights=teacher: " in refused.stderr) == (2, True)


def test_a_run_is_resumed_with_its_teacher_wherever_that_lies(
    typed_run: Typed, tmp_path: Path
) -> None:
    longer = typed_run("longer", *words("teacher", "epochs=3"))
    typed_run("student", *words("teacher"))
    (tmp_path / "teacher").rename(tmp_path / "moved")
    resumed = typed_run("student", *words("moved", "epochs=3"), "resume=auto")
    assert resumed.points == longer.points
    assert resumed.result["identity"] == longer.result["identity"]
    other = words("student", "epochs=4", "hydra.run.dir=longer", "resume=auto")
    refused = run(*other, cwd=tmp_path)
    assert (refused.returncode, "frozen" in refused.stderr) == (2, True)


def test_a_teacher_s_source_may_change_and_an_evaluation_does_not_read_it(
    typed_run: Typed, tmp_path: Path
) -> None:
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "teacher").rename(tmp_path / "first")
    typed_run("teacher", "~model", "+model={_target_: net.Net}", "max_steps=1", *SMALL)
    (tmp_path / "net.py").write_text(NET + "# changed")
    done = run(*words("teacher"), "hydra.run.dir=student", cwd=tmp_path)
    assert "task.teacher.weights=teacher: net.py: source code has changed" in done.stderr
    (tmp_path / "net.py").unlink()  # so that it is there, and can't be built
    measured = run("evaluate", "student", cwd=tmp_path)
    assert measured.returncode == 0, measured.stderr


def test_where_the_loss_calls_it_an_evaluation_needs_it(typed_run: Typed, tmp_path: Path) -> None:
    typed_run("student", *words("teacher", "+task.always=true"))
    assert run("evaluate", "student", cwd=tmp_path).returncode == 0
    shutil.rmtree(tmp_path / "teacher")
    measured = run("evaluate", "student", cwd=tmp_path)
    assert measured.returncode == 2
    assert "weights=teacher" in measured.stderr
    assert "Traceback" not in measured.stderr


def test_it_may_be_part_of_a_model_or_of_a_file(
    typed_run: Typed, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(tmp_path)
    own = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    torch.save(own.state_dict(), tmp_path / "own.pt")
    (tmp_path / "net.py").write_text(NET)
    teacher = "{_target_: expt.Frozen, weights: own.pt, model: {_target_: net.Net}}"
    model = f"+model={{_target_: own.Both, teacher: {teacher}}}"
    done = typed_run("student", "~model", model, "world_size=2", "epochs=1", *SMALL)
    assert {*done.state()["model"]} == {"layer.weight", "layer.bias"}
    loaded: Any = expt.load(tmp_path / "student")
    images = torch.rand(2, 1, 8, 8)
    assert torch.equal(loaded(images), loaded.model.layer(own(images)))


def test_gradients_reach_its_inputs_only(typed_run: Typed, tmp_path: Path) -> None:
    frozen = expt.Frozen(str(tmp_path / "teacher"))
    images = torch.rand(2, 1, 8, 8, requires_grad=True)
    frozen(images).sum().backward()
    assert images.grad is not None
    assert frozen.model is not None
    assert not any(one.requires_grad for one in frozen.model.parameters())
    assert not frozen.model.training
    with pytest.raises(ConfigError):
        expt.Frozen(str(tmp_path / "missing"))(images)


DISTILLED = "own.Distilled, teacher: {_target_: expt.Frozen,"
REFUSED = {
    "missing": (f"{DISTILLED} weights: missing}}", "task.teacher.weights=missing"),
    "damaged": (f"{DISTILLED} weights: broken}}", "task.teacher.weights=broken"),
    "a name for a model": (f"{DISTILLED} weights: own.pt, model: net.Net}}", "model=net.Net"),
    "weights without a model": (f"{DISTILLED} weights: own.pt}}", "task.teacher.weights=own.pt: "),
    "a wrong key": (f"{DISTILLED} weigths: own.pt}}", "weigths"),
    # its weights would be no part of the run's identity
    "made by code": ("own.Making, folder: teacher", "weights=teacher"),
}


@pytest.mark.parametrize(("task", "key"), REFUSED.values(), ids=REFUSED)
def test_what_can_teach_nobody_is_refused(
    task: str, key: str, typed_run: Typed, tmp_path: Path
) -> None:
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "own.pt")
    shutil.copytree(tmp_path / "teacher", tmp_path / "broken")
    for file in (tmp_path / "broken/checkpoints").iterdir():
        content = bytearray(file.read_bytes())
        content[-40] ^= 1
        file.unlink()
        file.write_bytes(bytes(content))
    words = ("~task", f"+task={{_target_: {task}}}", *STUDENT[2:], "hydra.run.dir=student")
    refused = run(*words, cwd=tmp_path)
    assert (refused.returncode, key in refused.stderr) == (2, True), refused.stderr
    assert "Traceback" not in refused.stderr
    assert not (tmp_path / "student").exists()


def test_a_callback_s_changes_nothing(typed_run: Typed, tmp_path: Path) -> None:
    net = "{_target_: expt.Frozen, weights: teacher}"
    callback = f"callbacks=[{{_target_: own.Watching, net: {net}}}]"
    done = run(
        *("model.hidden=[4]", "epochs=3", *SMALL, callback, "hydra.run.dir=run"), cwd=tmp_path
    )
    assert (done.returncode, "no checkpoint holds it" in done.stderr) == (0, False), done.stderr


@pytest.mark.slow
def test_one_within_a_teacher_counts_too(typed_run: Typed, tmp_path: Path) -> None:
    within = "+model={_target_: own.Both, teacher: {_target_: expt.Frozen, weights: teacher}}"
    typed_run("outer", "~model", within, "max_steps=2", *SMALL)
    student = typed_run("student", *words("outer"))
    assert "warning" not in run("predict", "outer", "--split", "test", cwd=tmp_path).stderr
    shutil.rmtree(tmp_path / "teacher")
    gone = run(*words("outer"), "hydra.run.dir=gone", cwd=tmp_path)
    assert gone.returncode == 2
    assert "task.teacher.weights=outer: the run needs model.teacher.weights=teacher" in gone.stderr
    typed_run("teacher", "model.hidden=[5]", "max_steps=3", *SMALL)
    assert typed_run("other", *words("outer")).result["identity"] != student.result["identity"]
    warned = run("predict", "outer", "--split", "test", cwd=tmp_path).stderr
    assert "model.teacher.weights=teacher: the run was trained with other" in warned


@pytest.mark.slow
def test_one_that_is_an_argument_of_another_s_model_counts_too(
    typed_run: Typed, tmp_path: Path
) -> None:
    torch.save(
        {f"layer.{x}": y for x, y in nn.Linear(10, 10).named_parameters()}, tmp_path / "own.pt"
    )
    within = "{_target_: own.Both, num_classes: 10, teacher: {_target_: expt.Frozen, weights: RUN}}"
    both = f"teacher: {{_target_: expt.Frozen, weights: own.pt, model: {within}}}"
    given = [
        word.replace("teacher: {_target_: expt.Frozen, weights: RUN}", both) for word in STUDENT
    ]
    given = [word.replace("RUN", "teacher") for word in given]
    student = typed_run("student", *given)
    shutil.rmtree(tmp_path / "teacher")
    typed_run("teacher", "model.hidden=[5]", "max_steps=3", *SMALL)
    assert typed_run("other", *given).result["identity"] != student.result["identity"]


@pytest.mark.slow
@pytest.mark.parametrize("cls", ["Both", "Cyclic"])
def test_it_may_be_part_of_a_sharded_model(cls: str, typed_run: Typed, tmp_path: Path) -> None:
    torch.save(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).state_dict(), tmp_path / "own.pt")
    (tmp_path / "net.py").write_text(NET)
    teacher = "{_target_: expt.Frozen, weights: own.pt, model: {_target_: net.Net}}"
    model = f"+model={{_target_: own.{cls}, teacher: {teacher}}}"
    each = ("~model", model, *SMALL, "world_size=2", "epochs=1", "timeout_s=30")
    whole, sharded = (typed_run(way, *each, f"strategy={way}") for way in ("ddp", "fsdp"))
    assert sharded.values == pytest.approx(whole.values, abs=1e-5)
