"""Every key that configures an object reaches it; what a setting does to a curve stands in
test_build.py.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from expt.config.constraints import Target
from expt.config.parse import parse
from expt.config.schema import RunConfig
from expt.data.build import Data
from expt.errors import ConfigError
from expt.machine import Machine
from expt.training.collectives import Worker
from expt.training.learner import Learner
from expt.worker.build import build_data, build_learner, check_first_output
from tests.composing import composed
from tests.facade import Capture, Patch, as_typed


def config(*overrides: str) -> RunConfig:
    return parse(composed(*overrides), Machine(cpus=8))


def worker(rank: int = 0, world_size: int = 1) -> Worker:
    cpu = torch.device("cpu")
    return Worker(
        rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size, device=cpu
    )


def built(*overrides: str, world_size: int = 1) -> tuple[Data, Learner]:
    made, me = config(*overrides), worker(world_size=world_size)
    data = build_data(made, me)
    return data, build_learner(made, data, me)


def test_the_layout_of_the_data_and_of_the_layers() -> None:
    words = ("dataset=synthetic", "dataset.channels=3", "dataset.image_size=[8,8]", "model=convnet")
    for on in (True, False):
        data, learner = built(*words, f"channels_last={str(on).lower()}")
        weight = [one for one in learner.module.parameters() if one.dim() == 4][-1]
        for found in (next(data.train.epoch(1)).inputs, weight):
            assert found.is_contiguous(memory_format=torch.channels_last) == on


def test_an_augmentation_reaches_training_images_alone() -> None:
    plain_data, augmented = built()[0], built("dataset.augment.cutout=4")[0]
    assert not torch.equal(
        next(plain_data.train.epoch(1)).inputs, next(augmented.train.epoch(1)).inputs
    )
    tests = [data.test for data in (plain_data, augmented) if data.test]
    assert torch.equal(next(tests[0].evaluation()).inputs, next(tests[1].evaluation()).inputs)


@pytest.mark.parametrize(
    ("wanted", "repays", "compiled"),
    [(True, 21, True), (False, 20, False), ("auto", 20, True), ("auto", 21, False)],
)
def test_long_run_is_compiled(wanted: Any, repays: int, compiled: bool, monkeypatch: Patch) -> None:
    monkeypatch.setattr("expt.training.compiling.REPAYS_STEPS", repays)
    made = dataclasses.replace(config("batch_size=64", "epochs=1"), compile=wanted)  # as on a GPU
    data = build_data(made, worker())
    assert build_learner(made, data, worker()).compiled == compiled


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
        build_data(made, worker(world_size=3))
        return
    with pytest.raises(ConfigError, match=f"^batch_norm=sync: an epoch's last batch {told}"):
        build_data(made, worker(world_size=3))


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
    learner = build_learner(made, build_data(made, worker()), worker())
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
    assert not hasattr(build_learner(made, build_data(made, worker()), worker()).module, "seen")


@pytest.mark.parametrize("rank", [0, 1])
def test_outputs_that_no_class_has_are_told_once(rank: int, capsys: Capture) -> None:
    made = with_model("Few", 11)
    who = dataclasses.replace(worker(), rank=rank)
    module = build_learner(made, build_data(made, worker()), who).module
    for _ in range(2):
        module(torch.zeros(2, 1, 8, 8))
    said = (
        f"model._target_={__name__}.Few: gives 11 outputs for each sample, and there are 10 classes"
    )
    assert capsys.readouterr().err.count(said) == (rank == 0)


def test_outputs_of_a_softmax_are_warned_of_once(capsys: Capture) -> None:
    for module in (nn.Softmax(1), nn.LogSoftmax(1), nn.Sigmoid()):
        check_first_output(module, "own.Net", 10, warns=True)
        for _ in range(2):
            module(torch.rand(2, 10))
    assert capsys.readouterr().err.count("softmax") == 1


@pytest.mark.parametrize(("model", "how", "rank", "told"), [
    ("mlp", "sync", 0, 1), ("mlp", "groups", 0, 1), ("mlp", "groups", 1, 0), ("mlp", "per_worker",
        0, 0),
    ("convnet", "groups", 0, 0),
])  # fmt: skip
def test_batch_norm_missing(model: str, how: str, rank: int, told: int, capsys: Capture) -> None:
    made = config(f"model={model}", f"batch_norm={how}")
    build_learner(made, build_data(made, worker()), dataclasses.replace(worker(), rank=rank))
    assert capsys.readouterr().err.count(f"warning: batch_norm={how}: ") == told


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
