"""Every setting of a step arrives there: curves of runs against a plain loop."""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from expt.config.constraints import Target
from expt.config.parse import parse
from expt.config.schema import RunConfig
from expt.data import indexing
from expt.data.build import Data
from expt.data.kinds.originals import Digits
from expt.errors import ConfigError
from expt.features import Features
from expt.inference import load
from expt.machine import Machine
from expt.training.learner import Learner
from expt.worker import build, parallel
from expt.worker.build import build_data, build_learner
from expt.worker.custom_code import check_first_output
from tests.composing import composed
from tests.conftest import Configured
from tests.facade import Capture, Patch, as_typed
from tests.ranks import worker_of
from tests.worker.conftest import ALONE, TrainAlone, TrainTogether

STEPS, SEED = 8, 3
MEAN, STD = 0.3053, 0.3760

Optimizer = Callable[[Any], torch.optim.Optimizer]


@functools.cache
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    how = {"val_fraction": 0.1, "train_limit": None, "mean": (MEAN,), "std": (STD,)}
    images, labels = Digits(name="digits", **how).load("train")  # type: ignore[arg-type]
    return torch.from_numpy(np.array(images)), torch.from_numpy(np.array(labels))


def sgd(lr: float = 0.05, **settings: Any) -> Optimizer:
    return lambda parameters: torch.optim.SGD(parameters, lr=lr, **{"momentum": 0.9, **settings})


SGD = sgd()


def plain_loop(
    *,
    optimizer: Optimizer = SGD,
    batch: int = 64,
    clip: Callable[[Any], object] = lambda parameters: None,
    smoothing: float = 0.0,
    factor: Callable[[int], float] = lambda step: 1.0,
    amp: bool = False,
    hidden: int = 256,
    limit: int | None = None,
) -> list[float]:
    images, labels = digits()
    train, _ = indexing.split(len(labels), 0.1, limit)
    order = train[indexing.permutation(len(train), SEED, 1)]
    torch.manual_seed(SEED)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))
    stepper, losses = optimizer(net.parameters()), []
    rates = [group["lr"] for group in stepper.param_groups]
    for step, part in enumerate(order.split(batch)[:STEPS]):
        for group, rate in zip(stepper.param_groups, rates, strict=True):
            group["lr"] = rate * factor(step)
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            logits = net((images[part].float() / 255 - MEAN) / STD)
        loss = functional.cross_entropy(logits.float(), labels[part], label_smoothing=smoothing)
        losses.append(loss.item())
        stepper.zero_grad()
        loss.backward()
        clip(net.parameters())
        stepper.step()
    return losses


def cosine(step: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * step / STEPS))


SETTINGS: dict[str, tuple[Sequence[str], dict[str, Any]]] = {
    "none": ([], {}),
    "gradient_clip": (
        ["gradient_clip=0.1"],
        {"clip": lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.1)},
    ),
    "gradient_clip_value": (
        ["gradient_clip_value=0.001"],
        {"clip": lambda parameters: nn.utils.clip_grad_value_(parameters, 0.001)},
    ),
    "label_smoothing": (["label_smoothing=0.2"], {"smoothing": 0.2}),
    "gradient_accumulation": (["gradient_accumulation=4"], {}),
    "sgd": (
        as_typed("optimizer.lr=0.2 optimizer.momentum=0.5 optimizer.weight_decay=0.1"),
        {"optimizer": sgd(0.2, momentum=0.5, weight_decay=0.1)},
    ),
    "nesterov": (["optimizer.nesterov=true"], {"optimizer": sgd(nesterov=True)}),
    "adamw": (
        ["optimizer=adamw", "optimizer.lr=0.01"],
        {"optimizer": lambda p: torch.optim.AdamW(p, lr=0.01)},
    ),
    "lr_scaling": (["lr_scaling=sqrt", "base_batch_size=16"], {"optimizer": sgd(0.1)}),
    "scheduler": (["scheduler=cosine"], {"factor": cosine}),
    "amp": (["amp=bf16"], {"amp": True}),
    "sizes": (
        as_typed("batch_size=32 model.hidden=[40] dataset.train_limit=600"),
        {"batch": 32, "hidden": 40, "limit": 600},
    ),
}


@pytest.fixture(scope="module")
def default() -> list[float]:
    return plain_loop()


@pytest.mark.parametrize("setting", SETTINGS)
def test_setting_in_curve(setting: str, default: list[float], train_alone: TrainAlone) -> None:
    words, changes = SETTINGS[setting]
    same = f"max_steps={STEPS} log_every=1 seed={SEED} eval_split=test objective=loss/test"
    done = train_alone(*words, *as_typed(same))
    expected = plain_loop(**changes)
    if setting not in ("none", "gradient_accumulation"):
        assert expected != pytest.approx(default, abs=2e-4), "the setting matters"
    found = [value for _, value in done.curve("running/loss")]
    assert found == pytest.approx(expected, abs=3e-4 if setting == "amp" else 1e-4)
    ((_, of_epoch),) = done.curve("loss/train")
    assert of_epoch == pytest.approx(np.mean(expected), abs=1e-3)


@pytest.mark.parametrize("leaves_out", [False, True])
def test_what_a_checkpoint_lacks_is_rank_0_s_when_it_is_loaded(leaves_out: bool) -> None:
    module = torch.nn.Linear(1, 1)
    if leaves_out:  # as of frozen weights that need not be saved
        module.register_state_dict_post_hook(lambda _, state, *__: state.__delitem__("weight"))
    assert parallel.without_broadcasts(module, begins=False)["init_sync"] == leaves_out


TEXT = as_typed(
    "model=transformer task=language_model dataset=text dataset.context=16 optimizer=adamw epochs=1"
    " model.layers=2 model.width=16 model.heads=2 model.dropout=0.2 max_steps=4 log_every=1"
    " ema=0.9 gradient_accumulation=2 batch_size=16 gradient_clip=0.1 amp=bf16"
)


@pytest.mark.slow
def test_what_saves_memory_changes_no_number(train_together: TrainTogether, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("to be or not to be, that is the question\n" * 60)
    words = (*TEXT, f"dataset.root='{tmp_path / 'book.txt'}'")
    kept = train_together(2, *words, name="kept")
    again = train_together(2, *words, "activation_checkpointing=auto", "offload=cpu", name="again")
    assert again.points == kept.points
    assert len(kept.curve("running/loss")) == 4


def config(*overrides: str) -> RunConfig:
    return parse(composed(*overrides), Machine(cpus=8))


def learner_of(made: RunConfig, **changes: Any) -> tuple[Data, Learner]:
    me = dataclasses.replace(worker_of(), **changes)
    data = build_data(made, me)
    return data, build_learner(made, data, me)


def built(*overrides: str, world_size: int = 1) -> tuple[Data, Learner]:
    return learner_of(config(*overrides), world_size=world_size, local_world_size=world_size)


def test_the_layout_of_the_data_and_of_the_layers() -> None:
    words = ("dataset=synthetic", "dataset.channels=3", "dataset.image_size=[8,8]", "model=convnet")
    for on in (True, False):
        data, learner = built(*words, f"channels_last={str(on).lower()}")
        weight = [one for one in learner.module.parameters() if one.dim() == 4][-1]
        for found in (next(data.train.epoch(1)).inputs, weight):
            assert found.is_contiguous(memory_format=torch.channels_last) == on


@pytest.mark.parametrize(
    ("wanted", "repays", "compiled"),
    [(True, 21, True), (False, 20, False), ("auto", 20, True), ("auto", 21, False)],
)
def test_long_run_is_compiled(wanted: Any, repays: int, compiled: bool, monkeypatch: Patch) -> None:
    monkeypatch.setattr("expt.training.compiling.REPAYS_STEPS", repays)
    made = dataclasses.replace(config("batch_size=64", "epochs=1"), compile=wanted)  # as on a GPU
    assert learner_of(made)[1].compiled == compiled


def test_the_initialisation() -> None:
    _, learner = built("init=normal", "init.std=0.001")
    weights = [
        parameter.detach() for parameter in learner.module.parameters() if parameter.dim() > 1
    ]
    assert max(float(weight.abs().max()) for weight in weights) < 0.01


def test_the_backward_pass_is_torchs_where_asked_for(monkeypatch: Patch) -> None:
    taken = list[float]()
    monkeypatch.setattr(
        "expt.training.precision.backward", lambda _, weight, of: taken.append(weight)
    )
    for override in ("patches.backward=true", "patches.backward=false"):
        _, learner = built(override)
        loss = next(learner.module.parameters()).sum()
        learner.precision.backward(loss, 0.5)
    assert taken == [0.5]


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone; DistributedDataParallel asks for one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", (False, False, True, 25)),
        (
            "ddp.find_unused_parameters=true ddp.gradient_as_bucket_view=false",
            (True, False, False, 25),
        ),
        ("ddp.static_graph=true ddp.bucket_cap_mb=3", (False, True, True, 3)),
        ("patches.unguarded=false", (False, False, True, 25)),
    ],
)
def test_distributed_data_parallel(words: str, expected: tuple[Any, ...]) -> None:
    two = ("ddp.shared_memory=false", "world_size=2")
    _, learner = built(*as_typed(words), *two, world_size=2)
    made = learner.strategy.model
    assert isinstance(made, DistributedDataParallel)
    found = (made.find_unused_parameters, made.static_graph, made.gradient_as_bucket_view)
    assert (*found, made.bucket_bytes_cap / 2**20) == expected
    types = type(made) is DistributedDataParallel, type(learner.optimizer) is torch.optim.SGD
    assert types == ("unguarded" in words,) * 2, "without torch's guards, unless they are asked for"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("batch_size=63", "dataset.train_limit=128"), "has 2 of 128 samples, .*; use drop"),
        (("batch_size=63", "dataset.train_limit=129"), None),
        (("batch_size=63", "dataset.train_limit=128", "drop_last=true"), None),
        (("batch_size=63", "dataset.train_limit=128", "batch_norm=per_worker"), None),
        (
            ("batch_size=66", "dataset.train_limit=69", "gradient_accumulation=2"),
            "has 3 of 69 samples, .* 6 equal micro-batches of 3 workers",
        ),
        (("batch_size=66", "dataset.train_limit=72", "gradient_accumulation=2"), None),
    ],
)
def test_sync_needs_samples_on_each_worker(words: tuple[str, ...], told: str | None) -> None:
    chosen = {"batch_norm": "sync", "drop_last": "false", "world_size": "3"}
    chosen |= dict(word.split("=") for word in words)
    made = config(*(f"{key}={value}" for key, value in chosen.items()))
    if told is None:
        build_data(made, worker_of(size=3))
        return
    with pytest.raises(ConfigError, match=f"^batch_norm=sync: an epoch's last batch {told}"):
        build_data(made, worker_of(size=3))


class Few(nn.Module):
    def __init__(
        self, *, channels: int, image_size: tuple[int, int], num_classes: int, outputs: int
    ) -> None:
        super().__init__()
        self.layer = nn.Linear(64, outputs)

    def forward(self, images: torch.Tensor) -> Any:
        return self.layer(images.flatten(1))


class Two(Few):
    def forward(self, images: torch.Tensor) -> Any:
        return super().forward(images), 0


class Flat(Few):
    def forward(self, images: torch.Tensor) -> Any:
        return super().forward(images)[:, 0]


class Counting(Few):
    def forward(self, images: torch.Tensor) -> Any:
        self.seen = True
        return super().forward(images)


def with_model(name: str, outputs: int, *overrides: str) -> RunConfig:
    target = Target(target=f"{__name__}.{name}", kwargs={"outputs": outputs})
    return dataclasses.replace(config(*overrides), model=target)


@pytest.mark.parametrize(
    ("name", "outputs", "told"),
    [
        ("Few", 10, None),
        ("Few", 9, "gives 9 outputs for each sample, and there are 10 classes; "),
        ("Two", 10, "gives a tuple; return one tensor, [samples, num_classes]"),
        ("Flat", 10, "gives float32 [2]; return one tensor, "),
    ],
)
def test_first_output_is_checked(name: str, outputs: int, told: str | None) -> None:
    made = with_model(name, outputs)
    _, learner = learner_of(made)
    module, images = learner.module, torch.zeros(2, 1, 8, 8)
    if told is None:
        assert module(images).shape == (2, 10)
    else:
        with pytest.raises(
            ConfigError, match=re.escape(f"model._target_={__name__}.{name}: {told}")
        ):
            module(images)
    module(images)  # once is enough


def test_metrics_are_tried_out_without_a_trace_in_the_model() -> None:
    pytest.importorskip("torchmetrics")
    auroc = "torchmetrics.classification.MulticlassAUROC, num_classes: 10"
    fine, wrong = (
        f"+task.metrics.x={{_target_: {metric}, better: max}}"
        for metric in (auroc, "torchmetrics.MeanSquaredError")
    )
    with pytest.raises(ConfigError, match=r"^task\.metrics\.x: "):
        built(wrong)
    made = with_model("Counting", 10, fine)
    assert not hasattr(learner_of(made)[1].module, "seen")


@pytest.mark.parametrize("rank", [0, 1])
def test_outputs_that_no_class_has_are_told_once(rank: int, capsys: Capture) -> None:
    made = with_model("Few", 11)
    module = learner_of(made, rank=rank)[1].module
    for _ in range(2):
        module(torch.zeros(2, 1, 8, 8))
    said = (
        f"model._target_={__name__}.Few: gives 11 outputs for each sample, and there are 10 classes"
    )
    assert capsys.readouterr().err.count(said) == (rank == 0)


def test_outputs_of_a_softmax_are_warned_of_once(capsys: Capture) -> None:
    for module in (nn.Softmax(1), nn.LogSoftmax(1), nn.Sigmoid()):
        check_first_output(module, "own.Net", 10, ALONE)
        for _ in range(2):
            module(torch.rand(2, 10))
    assert capsys.readouterr().err.count("softmax") == 1


@pytest.mark.parametrize(
    ("word", "expected"), [("eval_batch_size=auto", 4), ("eval_batch_size=7", 7)]
)
def test_an_evaluation_takes_no_more_custom_samples_than_training(word: str, expected: int) -> None:
    custom = (
        "~dataset",
        "+dataset._target_=tests.worker.own_pictures.Pictures",
        "+dataset.num_classes=10",
        word,
    )
    made = config(*custom, "batch_size=16", "gradient_accumulation=2", "world_size=2")
    assert made.samples_per_evaluation == expected
    assert config(word).samples_per_evaluation in (None, 7)


OWN = "tests.worker.own_pictures"
WORDS = (
    *(
        "~dataset",
        f"+dataset._target_={OWN}.Pictures",
        *as_typed("+dataset.num_workers=0 epochs=1 batch_size=20"),
    ),
    *("~task", f"+task._target_={OWN}.Embedded", "objective=loss/val"),
)
NET = ("~model", f"+model._target_={OWN}.Net")
FLOATS = "+dataset.dtype=float32"


def built_of_own_outputs(config: RunConfig) -> tuple[Any, Any]:
    """The run's model, and the same again from what its record has of the data."""
    data = build.build_data(config, ALONE)
    features = Features.read(data.info.record)
    return build.build_learner(config, data, ALONE).module, load._built(config, features, {})


@pytest.mark.parametrize(
    ("words", "outputs"),
    [
        ((), 10),
        (("+model.num_classes=12",), 12),
        ((FLOATS,), 1),
        ((FLOATS, "+model.num_classes=12"), 12),
        (("+dataset.num_classes=11",), 11),
    ],
)
def test_own_output_number(words: tuple[str, ...], outputs: int, configured: Configured) -> None:
    """Of a target that is a number there is one output, unless the model says otherwise."""
    for model in built_of_own_outputs(configured(*WORDS, *NET, *words)):
        assert model.layer.out_features == outputs


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ("model=mlp",),
            "model=mlp: needs num_classes, and the dataset has not; give dataset.num_classes=N, or",
        ),
        (("~model", f"+model._target_={OWN}.Named"), "'num_classes'"),
        (
            ("~model", "+model._target_=torch.nn.Linear", "+model.bias=false"),
            "needs 'in_features', 'out_features'; type model.in_features=... model.out_features=..."
            ", or let it take what expt passes from this dataset: channels=1, image_size=(",
        ),
        (
            (*NET, "+model.num_classes=9", "+dataset.num_classes=10"),
            "model.num_classes: expt passes this from the dataset;",
        ),
    ],
)
def test_number_of_outputs_wrong(words: tuple[str, ...], told: str, configured: Configured) -> None:
    with pytest.raises(ConfigError) as caught:
        built_of_own_outputs(configured(*WORDS, *words))
    assert told in str(caught.value)


def test_only_what_is_a_score_of_a_class_makes_a_confusion_matrix(train_alone: TrainAlone) -> None:
    more = (*NET, "+dataset.num_classes=10", "tensorboard.images=true")
    for name, words in (("embedded", WORDS), ("scores", WORDS[:-3])):
        done = train_alone(*words, *more, name=name)
        pictures = EventAccumulator(str(done.folder)).Reload().Tags()["images"]
        assert ("confusion/test" in pictures, bool(pictures)) == (name == "scores",) * 2


def test_dataparallel_gets_its_gpus(configured: Configured, monkeypatch: Patch) -> None:
    config = dataclasses.replace(configured(), strategy="dp")
    worker = dataclasses.replace(ALONE, gpus=(1, 3))
    monkeypatch.setattr(torch.nn, "DataParallel", lambda module, gpus: gpus)
    learner = build_learner(config, build_data(config, worker), worker)
    gpus: Any = learner.strategy.model
    assert gpus == [1, 3]
