"""What each `auto` becomes, key by key; that a whole configuration gets them stands in
test_parse.py."""

import dataclasses
from typing import Any

import pytest

from expt.config import auto
from expt.machine import Machine

TWO_GPUS = Machine(gpus=("a", "b"), cpus=8)
CPU = Machine(cpus=8)


def machine(gpus: int = 0, cpus: int = 8, **facts: Any) -> Machine:
    return Machine(gpus=tuple(map(str, range(gpus))), cpus=cpus, **facts)


@pytest.mark.parametrize(
    ("node", "on", "expected"),
    [
        ({}, machine(0), 0),
        ({}, machine(8), 8),
        ({"debug": True}, machine(8), 1),
        ({"debug": True}, machine(0), 0),
        ({}, machine(8, workers=4, local_workers=2), 2),
        ({}, machine(1, workers=4, local_workers=2), 1),
        ({"world_size": 2}, machine(8), 2),
        ({"world_size": 16}, machine(8), 8),
        ({"world_size": 1, "strategy": "dp"}, machine(8), 8),
    ],
)
def test_gpus(node: dict[str, Any], on: Machine, expected: int) -> None:
    assert auto.gpus(node, on) == expected


@pytest.mark.parametrize(
    ("node", "on", "expected"),
    [
        ({"gpus": 0}, machine(8), 2),
        ({"gpus": 3}, machine(8), 3),
        ({"gpus": [4, 5]}, machine(8), 2),
        ({"gpus": "all"}, machine(8), 2),
        ({"gpus": -1}, machine(8), 2),
        ({"gpus": 3, "debug": True}, machine(8), 1),
        ({"gpus": 3, "strategy": "dp"}, machine(8), 1),
        ({"gpus": 3}, machine(8, workers=16, local_workers=8), 16),
    ],
)
def test_world_size(node: dict[str, Any], on: Machine, expected: int) -> None:
    assert auto.world_size(node, on) == expected


@pytest.mark.parametrize(
    ("node", "on", "expected"),
    [
        ({"gpus": 0}, machine(1), "gloo"),
        ({"gpus": 1}, machine(1), "nccl"),
        ({"gpus": [0]}, machine(1), "nccl"),
        ({"gpus": 1}, machine(1, simulated=True), "gloo"),
    ],
)
def test_backend(node: dict[str, Any], on: Machine, expected: str) -> None:
    assert auto.backend(node, on) == expected


@pytest.mark.parametrize(
    ("node", "on", "expected"),
    [
        ({"world_size": 2}, machine(cpus=8), 4),
        ({"world_size": 3}, machine(cpus=8), 2),
        ({"world_size": 16}, machine(cpus=8), 1),
        ({"world_size": 0}, machine(cpus=8), 8),
        ({"world_size": "two"}, machine(cpus=8), 8),
        ({"world_size": 16}, machine(cpus=8, workers=16, local_workers=4), 2),
    ],
)
def test_threads(node: dict[str, Any], on: Machine, expected: int) -> None:
    assert auto.threads(node, on) == expected


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ({"name": "mlp"}, False),
        ({"name": "convnet"}, True),
        ({"name": "paddle_convnet"}, True),
        ({"name": "resnet18"}, True),
        ({"_target_": "mine.Net"}, False),
        ({"name": ["odd"]}, False),
        ("odd", False),
        (None, False),
    ],
    ids=str,
)
def test_channels_last(model: Any, expected: bool) -> None:
    assert auto.channels_last({"model": model}, CPU) is expected


@pytest.mark.parametrize(
    ("node", "on", "expected"),
    [
        ({"gpus": 0}, CPU, False),
        ({"gpus": 1}, machine(1), "auto"),
        ({"gpus": [0, 1]}, machine(2), "auto"),
        ({"gpus": 1}, machine(1, simulated=True), False),
        ({"gpus": 2, "strategy": "dp"}, machine(2), False),
    ],
    ids=str,
)
def test_compile(node: dict[str, Any], on: Machine, expected: object) -> None:
    """On a GPU the worker decides, who knows the steps."""
    assert auto.compiled(node, on) == expected
    assert auto.fill_auto({**node, "compile": "auto"}, on)["compile"] == expected


@pytest.mark.parametrize(
    ("size", "world_size", "expected"),
    [
        (64, 4, 64),
        ("32 per worker", 4, 128),
        (" 32 per worker ", 4, 128),
        ("32 per workers", 4, "32 per workers"),
        ("32 per worker", "odd", "32 per worker"),
        (None, 4, None),
    ],
)
def test_batch_size(size: Any, world_size: Any, expected: Any) -> None:
    assert auto.batch_size({"batch_size": size, "world_size": world_size}) == expected


EVERY: dict[str, Any] = {
    "gpus": "auto", "world_size": "auto", "backend": "auto", "threads": "auto",
    "channels_last": "auto",
    "batch_size": "32 per worker", "model": {"name": "convnet"},
    "tensorboard": {"images": "auto", "graph": "auto"}, "epochs": "auto",
}  # fmt: skip


def test_each_value_follows_from_those_before() -> None:
    assert auto.fill_auto(EVERY, TWO_GPUS) == {
        "gpus": 2, "world_size": 2, "backend": "nccl", "threads": 4, "channels_last": True,
        "batch_size": 64, "model": {"name": "convnet"}, "tensorboard": {"images": "end",
            "graph": "auto"},
        "epochs": "auto",
    }  # fmt: skip
    assert EVERY["tensorboard"]["images"] == "auto", "what was given stays as it is"


def test_what_is_chosen_stays() -> None:
    chosen = {
        "gpus": 1, "world_size": 3, "backend": "gloo", "threads": 5, "channels_last": False,
        "batch_size": 7, "model": {"name": "convnet"}, "tensorboard": {"images": False},
    }  # fmt: skip
    assert auto.fill_auto(chosen, TWO_GPUS) == auto.fill_auto_of_a_sweep(chosen) == chosen


def test_in_a_sweep_a_run_takes_one_thread_and_shows_pictures_in_its_spare_time() -> None:
    filled = auto.fill_auto(auto.fill_auto_of_a_sweep(EVERY), CPU)
    assert (filled["threads"], filled["tensorboard"]["images"]) == (1, "spare")
    expected = {"tensorboard": None, "threads": None}
    assert auto.fill_auto_of_a_sweep({"tensorboard": None, "threads": None}) == expected


def test_what_slurm_has_given_each_task_is_not_shared_out_again() -> None:
    shared = Machine(gpus=("0",), cpus=8, workers=4, local_workers=4)
    own = dataclasses.replace(shared, own_cpus=True, own_gpus=True)
    assert (auto.threads({"world_size": 4}, shared), auto.threads({"world_size": 4}, own)) == (2, 8)
    assert auto.gpus({}, own) == 1
    assert auto.gpus({}, dataclasses.replace(own, gpus=("0", "1"))) == 1  # one worker drives one


def test_cuda_shows_one_slice_of_a_gpu() -> None:
    assert auto.gpus({}, Machine(gpus=("MIG-a", "MIG-b"), cpus=8)) == 1
