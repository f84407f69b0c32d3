"""At the edge of each rule: the last configuration that it lets through, and the first that it
refuses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from expt.config.parse import parse
from expt.errors import ConfigError
from expt.machine import Machine
from tests.composing import composed


@pytest.fixture(scope="module")
def defaults() -> dict[str, Any]:
    """What conf/ says, each group's default chosen."""
    return composed()


def machine(gpus: int = 0, **facts: Any) -> Machine:
    return Machine(gpus=tuple(map(str, range(gpus))), cpus=8, **facts)


def problems(defaults: Mapping[str, Any], on: Machine, **changed: Any) -> list[str]:
    nested = {
        key: {**(defaults[key] or {}), **value}
        for key, value in changed.items()
        if isinstance(value, dict)
    }
    try:
        parse({**defaults, **changed, **nested}, on)
    except ConfigError as error:
        return list(error.problems)
    return []


AUROC = {"_target_": "torchmetrics.AUROC", "better": "max"}
# Each: the machine, what is let through, what is refused, and how the one problem begins.
EDGES: dict[str, tuple[Machine, dict[str, Any], dict[str, Any], str]] = {
    "as many GPUs": (machine(2), {"gpus": 2}, {"gpus": 3, "batch_size": 66}, "gpus=3: this machine has 2 GPUs; "),
    "the last GPU": (
        machine(2), {"gpus": [1]}, {"gpus": [2]}, "gpus=[2]: this machine has 2 GPUs, counted from 0; ",
    ),
    "one GPU twice": (machine(2), {"gpus": [1, 0]}, {"gpus": [1, 1]}, "gpus=[1,1]: names a GPU twice; "),
    "the workers that a launcher has started": (
        machine(0, workers=4, local_workers=2), {"world_size": 4}, {"world_size": 2},
        "world_size=2: 4 workers were started; leave world_size out",
    ),
    "slices of a GPU": (
        Machine(gpus=("MIG-a", "MIG-b"), cpus=8), {"gpus": [1]}, {"gpus": 2},
        "gpus=2: CUDA shows a process one slice of a GPU (MIG) alone; use gpus=1",
    ),
    "a GPU for each task of Slurm's": (
        machine(2, workers=4, local_workers=4, own_gpus=True), {"gpus": 1, "world_size": 4},
        {"gpus": 2, "world_size": 4, "backend": "gloo"}, "world_size=1: 2 GPUs need as many workers; use gpus=1",
    ),
    "gradients of several parts in CUDA graphs": (
        machine(1), {"gpus": 1, "gradient_accumulation": 2, "compile": True},
        {"gpus": 1, "gradient_accumulation": 2, "compile": "reduce-overhead"},
        "gradient_accumulation=2: with compile=reduce-overhead (CUDA graphs) each part of a batch would overwrite",
    ),
    "shards for one worker": (
        machine(0), {"strategy": "fsdp", "world_size": 2}, {"strategy": "fsdp", "world_size": 1},
        "strategy=fsdp: needs at least 2 workers",
    ),
    "shards under a debugger": (
        machine(0), {"strategy": "ddp", "debug": True}, {"strategy": "fsdp", "debug": True},
        "strategy=fsdp: needs at least 2 workers",
    ),
    "replicas of fsdp": (
        machine(0), {"strategy": "fsdp", "world_size": 4},
        {"strategy": "fsdp", "world_size": 4, "sharding": {"shards": 2}},
        "sharding.shards=2: strategy=fsdp has one shard for each of 4 workers",
    ),
    "one replica": (
        machine(0, workers=4, local_workers=2), {"strategy": "hsdp", "world_size": 4},
        {"strategy": "hsdp", "world_size": 4, "sharding": {"shards": 4}},
        "sharding.shards=4: strategy=hsdp divides 4 workers into equal groups of 2 or more",
    ),
    "replicas that do not come out even": (
        machine(0), {"strategy": "hsdp", "world_size": 4, "sharding": {"shards": 2}},
        {"strategy": "hsdp", "world_size": 4, "sharding": {"shards": 3}},
        "sharding.shards=3: strategy=hsdp divides 4 workers into equal groups of 2 or more",
    ),
    "a graph of shards": (
        machine(2), {"strategy": "fsdp"}, {"strategy": "fsdp", "tensorboard": {"graph": True}},
        "tensorboard.graph=true: one worker would trace a model",
    ),
    "GPUs beside the workers of one machine": (
        machine(4, workers=4, local_workers=2), {"gpus": 2}, {"gpus": 4, "backend": "gloo"},
        "world_size=2: 4 GPUs need as many workers; use gpus=2",
    ),
    "nccl on simulated GPUs": (
        machine(2, simulated=True), {"backend": "gloo"}, {"backend": "nccl"}, "backend=nccl: needs a GPU, ",
    ),
    "nccl without a GPU": (machine(2), {"backend": "nccl"}, {"gpus": 0, "backend": "nccl"}, "backend=nccl: needs "),
    "nccl with two workers on a GPU": (
        machine(2), {"backend": "nccl", "world_size": 2}, {"backend": "nccl", "world_size": 4},
        "world_size=4: nccl takes one worker per GPU, ",
    ),
    "a debugger in two workers": (
        machine(0), {"debug": True, "world_size": 1}, {"debug": True, "world_size": 2}, "world_size=2: debug=true ",
    ),
    "fp16 on this CPU": (
        machine(0), {"amp": "bf16"}, {"amp": "fp16"}, "amp=fp16: this CPU does not compute in float16; ",
    ),
    "shared statistics, compiled on a CPU": (
        machine(1), {"batch_norm": "sync", "compile": True}, {"gpus": 0, "batch_norm": "sync", "compile": True},
        "batch_norm=sync: torch.compile can't take these layers on a CPU; ",
    ),
    "whole groups": (
        machine(0), {"batch_norm": "groups", "world_size": 2}, {"batch_norm": "groups", "world_size": 4},
        "batch_norm_group=32: each worker computes 16 samples at once, which must be whole groups; "
        "use batch_norm_group=16 or batch_size=128",
    ),
    "whole groups in each part": (
        machine(0), {"batch_norm_group": 8, "batch_norm": "groups", "batch_size": 48, "gradient_accumulation": 3},
        {"batch_norm_group": 5, "batch_norm": "groups", "batch_size": 48, "gradient_accumulation": 3},
        "batch_norm_group=5: each worker computes 8 samples at once, which must be whole groups; "
        "use batch_norm_group=4 or batch_size=60",
    ),
    "powersgd after a nan": (
        machine(0), {"on_nan": "stop", "ddp": {"comm_hook": "powersgd"}},
        {"on_nan": "skip", "ddp": {"comm_hook": "powersgd"}}, "on_nan=skip: powersgd would carry ",
    ),
    "another hook after a nan": (
        machine(0), {"on_nan": "skip", "ddp": {"comm_hook": "bf16"}},
        {"on_nan": "skip", "ddp": {"comm_hook": "powersgd"}}, "on_nan=skip: powersgd",
    ),
    "data parallel on one GPU": (
        machine(2), {"strategy": "dp"}, {"strategy": "dp", "gpus": 1}, "strategy=dp: shares each batch out among ",
    ),
    "data parallel in two workers": (
        machine(2), {"strategy": "dp", "world_size": 1}, {"strategy": "dp", "world_size": 2, "backend": "gloo"},
        "world_size=2: strategy=dp has one process for all GPUs; ",
    ),
    "data parallel, compiled": (
        machine(2), {"strategy": "dp", "compile": False}, {"strategy": "dp", "compile": "max-autotune"},
        "compile=max-autotune: the copies that strategy=dp makes can't be compiled; ",
    ),
    "data parallel with shared statistics": (
        machine(2), {"strategy": "dp"}, {"strategy": "dp", "batch_norm": "groups"},
        "batch_norm=groups: strategy=dp can't share batch statistics; ",
    ),
    "oneDNN, compiled": (
        machine(0), {"onednn": True}, {"onednn": True, "compile": True}, "onednn=true: torch.compile can't take ",
    ),
    "a scaled learning rate": (
        machine(0), {"lr_scaling": "sqrt", "base_batch_size": 32}, {"lr_scaling": "sqrt"},
        "lr_scaling=sqrt: needs the batch that optimizer.lr is meant for",
    ),
    "printing what is logged": (
        machine(0), {"print_every": 100}, {"print_every": 60}, "print_every=60: what is printed is logged, ",
    ),
    "a batch in equal parts": (
        machine(0), {"batch_size": 60, "gradient_accumulation": 3}, {"batch_size": 64, "gradient_accumulation": 3},
        "batch_size=64: is the global batch and must divide by 2 workers x 3 parts ",
    ),
    "something to evaluate on": (
        machine(0), {"dataset": {"val_fraction": 0}, "eval_split": "test", "objective": "accuracy/test"},
        {"dataset": {"val_fraction": 0}}, "dataset.val_fraction=0.0: leaves nothing to evaluate on; ",
    ),
    "a fold of how many": (
        machine(0), {"dataset": {"folds": 5, "fold": 4, "val_fraction": 0}}, {"dataset": {"fold": 0}},
        "dataset.fold=0: is one of dataset.folds; say how many there are, as in dataset.folds=5",
    ),
    "folds without one that validates": (
        machine(0), {"dataset": {"folds": 2, "fold": 0}}, {"dataset": {"folds": 2}},
        "dataset.folds=2: say which one validates, as in dataset.fold=0 or -m 'dataset.fold=range(2)'",
    ),
    "one of the folds": (
        machine(0), {"dataset": {"folds": 2, "fold": 1}}, {"dataset": {"folds": 2, "fold": 2}},
        "dataset.fold=2: dataset.folds=2 are counted from 0; use 0 to 1",
    ),
    "an objective that is measured": (
        machine(0), {"objective": "loss/train"}, {"objective": "loss"}, "objective=loss: not one of loss/train, ",
    ),
    "a metric that is measured": (
        machine(0), {"objective": "loss/val"}, {"objective": "f1/val"}, "objective=f1/val: not one of loss/train, ",
    ),
    "a metric that ends the run": (
        machine(0), {"early_stop": {"metric": "loss/train", "patience": 1}},
        {"early_stop": {"metric": "loss/test", "patience": 1}},
        "early_stop.metric=loss/test: is not measured after each epoch; use one of loss/train, loss/val, accuracy/",
    ),
    "a metric that evaluations alone measure": (
        machine(0), {"task": {"metrics": {"auroc": AUROC}}, "early_stop": {"metric": "auroc/val", "patience": 1}},
        {"task": {"metrics": {"auroc": AUROC}}, "early_stop": {"metric": "auroc/train", "patience": 1}},
        "early_stop.metric=auroc/train: is not measured after each epoch; use one of loss/train, loss/val, accuracy/",
    ),
    "a warm-up within the run": (
        machine(0), {"epochs": 5, "scheduler": {"warmup_epochs": 5.0}},
        {"epochs": 5, "scheduler": {"warmup_epochs": 5.5}},
        "scheduler.warmup_epochs=5.5: the run ends before, after epochs=5; use 5 or less",
    ),
    "a split that is evaluated": (
        machine(0), {"eval_split": "test", "objective": "loss/test"}, {"eval_split": "test", "objective": "loss/val"},
        "objective=loss/val: eval_split=test has no val; use objective=loss/test",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("on", "fine", "wrong", "begins"), EDGES.values(), ids=EDGES.keys())
def test_each_rule_at_its_edge(
    on: Machine, fine: dict[str, Any], wrong: dict[str, Any], begins: str, defaults: dict[str, Any]
) -> None:
    assert problems(defaults, on, **fine) == []
    (problem,) = problems(defaults, on, **wrong)
    assert problem.startswith(begins)


@pytest.mark.parametrize(
    "lists", [{"kernels": [3]}, {"strides": [1] * 4}, {"paddings": []}, {"widths": [1, 2]}], ids=str
)
def test_a_convolution_needs_each_of_its_settings(
    lists: dict[str, Any], defaults: dict[str, Any]
) -> None:
    model = composed("model=convnet")["model"]
    assert problems({**defaults, "model": model}, machine()) == []
    (problem,) = problems({**defaults, "model": model}, machine(), model=lists)
    assert problem.startswith("model.widths=")
    assert problem.endswith("; give each one")


TABLES = {
    "dataset=diabetes": (
        "task=classification: dataset=diabetes has numbers to predict; use task=regression"
    ),
    "dataset=diabetes task=multilabel": (
        "task=multilabel: dataset=diabetes has numbers to predict; use task=regression"
    ),
    "dataset=diabetes task=regression model=convnet": (
        "model=convnet: takes images, and dataset=diabetes has rows of "
    ),
    "experiment=diabetes eval_split=test dataset.test_fraction=0": (
        "eval_split=test: dataset.test_fraction=0.0 "
    ),
    "dataset=table dataset.path=t.csv dataset.targets=[a,b]": (
        "task=classification: dataset.targets names 2 columns"
    ),
    "task=regression": (
        "task=regression: dataset=digits has one class for each sample; use task=classification"
    ),
}


@pytest.mark.parametrize(("words", "begins"), TABLES.items(), ids=TABLES.keys())
def test_tables_and_tasks_that_do_not_go_together(words: str, begins: str) -> None:
    settings = composed(*words.split())
    with pytest.raises(ConfigError) as caught:
        parse(settings, machine())
    assert caught.value.problems[0].startswith(begins)


def test_parameters_that_are_trained_in_a_few_epochs_need_a_schedule_that_can_end_for_them() -> (
    None
):
    groups = "optimizer.groups=[{match:bias,epochs:3}]"
    for scheduler in ("constant", "cosine", "step", "one_cycle"):
        assert (
            parse(composed(groups, f"scheduler={scheduler}"), machine()).optimizer.groups[0].epochs
            == 3
        )
    with pytest.raises(ConfigError) as caught:
        parse(composed(groups, "scheduler=plateau"), machine())
    assert list(caught.value.problems) == [
        "optimizer.groups.0.epochs=3: scheduler=plateau sets rates by itself; use constant, cosine,"
        " step or one_cycle"
    ]
