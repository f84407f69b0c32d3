"""What each `auto` becomes, key by key; that a whole configuration gets them stands in
test_parse.py."""

from typing import Any

import pytest

from expt.config import auto
from expt.machine import Machine
from tests.facade import machine

TWO_GPUS = Machine(gpus=("a", "b"), cpus=8)
CPU = Machine(cpus=8)


CASES: list[tuple[str, dict[str, Any], Machine, object]] = [
    ("gpus", {}, machine(0), 0),
    ("gpus", {}, machine(8), 8),
    ("gpus", {"debug": True}, machine(8), 1),
    ("gpus", {"debug": True}, machine(0), 0),
    ("gpus", {}, machine(8, workers=4, local_workers=2), 2),
    ("gpus", {}, machine(1, workers=4, local_workers=2), 1),
    ("gpus", {"world_size": 2}, machine(8), 2),
    ("gpus", {"world_size": 16}, machine(8), 8),
    ("gpus", {"world_size": 1, "strategy": "dp"}, machine(8), 8),
    ("world_size", {"gpus": 0}, machine(8), 2),
    ("world_size", {"gpus": 3}, machine(8), 3),
    ("world_size", {"gpus": [4, 5]}, machine(8), 2),
    ("world_size", {"gpus": "all"}, machine(8), 2),
    ("world_size", {"gpus": -1}, machine(8), 2),
    ("world_size", {"gpus": 3, "debug": True}, machine(8), 1),
    ("world_size", {"gpus": 3, "strategy": "dp"}, machine(8), 1),
    ("world_size", {"gpus": 3}, machine(8, workers=16, local_workers=8), 16),
    ("backend", {"gpus": 0}, machine(1), "gloo"),
    ("backend", {"gpus": 1}, machine(1), "nccl"),
    ("backend", {"gpus": [0]}, machine(1), "nccl"),
    ("backend", {"gpus": 1}, machine(1, simulated=True), "gloo"),
    ("threads", {"world_size": 2}, machine(cpus=8), 4),
    ("threads", {"world_size": 3}, machine(cpus=8), 2),
    ("threads", {"world_size": 16}, machine(cpus=8), 1),
    ("threads", {"world_size": 0}, machine(cpus=8), 8),
    ("threads", {"world_size": "two"}, machine(cpus=8), 8),
    ("threads", {"world_size": 16}, machine(cpus=8, workers=16, local_workers=4), 2),
    ("channels_last", {"model": {"name": "mlp"}}, CPU, False),
    ("channels_last", {"model": {"name": "convnet"}}, CPU, True),
    ("channels_last", {"model": {"name": "paddle_convnet"}}, CPU, True),
    ("channels_last", {"model": {"name": "resnet18"}}, CPU, True),
    ("channels_last", {"model": {"_target_": "mine.Net"}}, CPU, False),
    ("channels_last", {"model": {"name": ["odd"]}}, CPU, False),
    ("channels_last", {"model": "odd"}, CPU, False),
    ("channels_last", {"model": None}, CPU, False),
    ("compile", {"gpus": 0}, CPU, False),
    ("compile", {"gpus": 1}, machine(1), "auto"),  # the worker decides, who knows the steps
    ("compile", {"gpus": [0, 1]}, machine(2), "auto"),
    ("compile", {"gpus": 1}, machine(1, simulated=True), False),
    ("compile", {"gpus": 2, "strategy": "dp"}, machine(2), False),
    # what Slurm has given each task is not shared out again
    ("threads", {"world_size": 4}, machine(1, workers=4, local_workers=4), 2),
    ("threads", {"world_size": 4}, machine(1, workers=4, local_workers=4, own_cpus=True), 8),
    ("gpus", {}, machine(1, workers=4, local_workers=4, own_gpus=True), 1),
    ("gpus", {}, machine(2, workers=4, local_workers=4, own_gpus=True), 1),  # one worker drives one
    ("gpus", {}, Machine(gpus=("MIG-a", "MIG-b"), cpus=8), 1),  # CUDA shows one slice
]


@pytest.mark.parametrize(("key", "node", "on", "expected"), CASES)
def test_auto(key: str, node: dict[str, Any], on: Machine, expected: object) -> None:
    assert auto.fill_auto({**node, key: "auto"}, on)[key] == expected


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
    node = {"batch_size": size, "world_size": world_size}
    assert auto.fill_auto(node, CPU)["batch_size"] == expected


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
