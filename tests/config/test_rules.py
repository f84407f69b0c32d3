"""At the edge of each rule: the last configuration that it lets through, and the first that it
refuses."""

import re
from typing import Any

import pytest

from expt.command.grammar import parse_one
from expt.config.parse import parse, with_value
from expt.errors import ConfigError
from expt.machine import Machine
from tests.composing import composed
from tests.facade import machine


def problems(on: Machine, *words: str) -> list[str]:
    try:
        parse(composed(*words), on)
    except ConfigError as error:
        return list(error.problems)
    return []


# Each: the machine, what is let through, what is refused, and how the one problem begins.
EDGES: dict[str, tuple[Machine, str, str, str]] = {
    "as many GPUs": (machine(2), "gpus=2", "gpus=3 batch_size=66", "gpus=3: "),
    "the last GPU": (machine(2), "gpus=[1]", "gpus=[2]", "gpus=[2]: "),
    "one GPU twice": (machine(2), "gpus=[1,0]", "gpus=[1,1]", "gpus=[1,1]: "),
    "the workers that a launcher has started": (machine(0, workers=4, local_workers=2),
        "world_size=4", "world_size=2", "world_size=2: "),
    "slices of a GPU": (Machine(gpus=("MIG-a", "MIG-b"), cpus=8), "gpus=[1]", "gpus=2", "gpus=2: "),
    "a GPU for each task of Slurm's": (machine(2, workers=4, local_workers=4, own_gpus=True),
        "gpus=1 world_size=4", "gpus=2 world_size=4 backend=gloo", "gpus=2: "),
    "shards for one worker": (machine(0), "strategy=fsdp world_size=2",
        "strategy=fsdp world_size=1", "strategy=fsdp: needs at least 2 workers"),
    "shards under a debugger": (machine(0), "strategy=ddp debug=true", "strategy=fsdp debug=true",
        "strategy=fsdp: needs at least 2 workers"),
    "replicas of fsdp": (machine(0), "strategy=fsdp world_size=4",
        "strategy=fsdp world_size=4 sharding.shards=2",
        "sharding.shards=2: strategy=fsdp has one shard for each of 4 workers"),
    "one replica": (machine(0, workers=4, local_workers=2), "strategy=hsdp world_size=4",
        "strategy=hsdp world_size=4 sharding.shards=4",
        "sharding.shards=4: strategy=hsdp divides 4 workers into equal groups of 2 or more"),
    "replicas that do not come out even": (machine(0),
        "strategy=hsdp world_size=4 sharding.shards=2",
        "strategy=hsdp world_size=4 sharding.shards=3",
        "sharding.shards=3: strategy=hsdp divides 4 workers into equal groups of 2 or more"),
    "shards by default on one machine": (machine(0), "strategy=hsdp world_size=4 sharding.shards=2",
        "strategy=hsdp world_size=4",
        "sharding.shards=auto: strategy=hsdp divides 4 workers into equal groups of 2 or more; "
        "use sharding.shards=2, or strategy=fsdp"),
    "replicas of one worker": (machine(0), "strategy=fsdp world_size=2",
        "strategy=hsdp world_size=2",
        "sharding.shards=auto: strategy=hsdp divides 2 workers into equal groups of 2 or more; "
        "use strategy=fsdp with"),
    "a debugger on two GPUs": (machine(2), "gpus=1 debug=true", "gpus=2 debug=true",
        "gpus=2: 2 GPUs need a worker each, and there are only 1 (debug=true"),
    "a GPU beyond the last": (machine(4), "gpus=[3]", "gpus=[4]",
        "gpus=[4]: this machine has 4 GPUs, counted from 0; use numbers up to 3"),
    "GPUs beside the workers of one machine": (machine(4, workers=4, local_workers=2), "gpus=2",
        "gpus=4 backend=gloo", "gpus=4: "),
    "nccl on simulated GPUs": (machine(2, simulated=True), "backend=gloo", "backend=nccl",
        "backend=nccl: "),
    "nccl without a GPU": (machine(2), "backend=nccl", "gpus=0 backend=nccl", "backend=nccl: "),
    "nccl with two workers on a GPU": (machine(2), "backend=nccl world_size=2",
        "backend=nccl world_size=4", "backend=nccl: "),
    "a debugger in two workers": (machine(0), "debug=true world_size=1", "debug=true world_size=2",
        "world_size=2: "),
    "fp16 on this CPU": (machine(0), "amp=bf16", "amp=fp16", "amp=fp16: "),
    "shared statistics, compiled on a CPU": (machine(1), "batch_norm=sync compile=true",
        "gpus=0 batch_norm=sync compile=true", "batch_norm=sync: "),
    "whole groups": (machine(0), "batch_norm=groups world_size=2", "batch_norm=groups world_size=4",
        "batch_norm_group=32: "),
    "whole groups in each part": (machine(0),
        "batch_norm_group=8 batch_norm=groups batch_size=48 gradient_accumulation=3",
        "batch_norm_group=5 batch_norm=groups batch_size=48 gradient_accumulation=3",
        "batch_norm_group=5: "),
    "micro-batches of shards": (machine(0), "gradient_accumulation=auto",
        "gradient_accumulation=auto strategy=fsdp world_size=2", "gradient_accumulation=auto: "),
    "statistics of micro-batches": (machine(0), "batch_norm=sync",
        "gradient_accumulation=auto batch_norm=sync", "gradient_accumulation=auto: "),
    "compressed micro-batches": (machine(0), "ddp.comm_hook=bf16",
        "gradient_accumulation=auto ddp.comm_hook=bf16", "gradient_accumulation=auto: "),
    "micro-batches in CUDA graphs": (machine(1), "gradient_accumulation=auto compile=true",
        "gradient_accumulation=auto compile=reduce-overhead", "gradient_accumulation=auto: "),
    "a test of few batches": (machine(0), "overfit_batches=2", "overfit_batches=2 eval_split=test",
        "overfit_batches=2: "),
    "powersgd after a nan": (machine(0), "on_nan=stop ddp.comm_hook=powersgd",
        "on_nan=skip ddp.comm_hook=powersgd", "on_nan=skip: "),
    "data parallel on one GPU": (machine(2), "strategy=dp", "strategy=dp gpus=1", "strategy=dp: "),
    "data parallel in two workers": (machine(2), "strategy=dp world_size=1",
        "strategy=dp world_size=2 backend=gloo", "world_size=2: "),
    "data parallel, compiled": (machine(2), "strategy=dp compile=false",
        "strategy=dp compile=max-autotune", "compile=max-autotune: "),
    "data parallel with shared statistics": (machine(2), "strategy=dp",
        "strategy=dp batch_norm=groups", "batch_norm=groups: "),
    "a scaled learning rate": (machine(0), "lr_scaling=sqrt base_batch_size=32", "lr_scaling=sqrt",
        "lr_scaling=sqrt: "),
    "printing what is logged": (machine(0), "print_every=100", "print_every=60",
        "print_every=60: "),
    "a batch in equal parts": (machine(0), "batch_size=60 gradient_accumulation=3",
        "batch_size=64 gradient_accumulation=3", "batch_size=64: "),
    "something to evaluate on": (machine(0),
        "dataset.val_fraction=0 eval_split=test objective=accuracy/test", "dataset.val_fraction=0",
        "dataset.val_fraction=0: "),
    "a fold of how many": (machine(0), "dataset.folds=5 dataset.fold=4 dataset.val_fraction=0",
        "dataset.fold=0", "dataset.fold=0: "),
    "folds without one that validates": (machine(0), "dataset.folds=2 dataset.fold=0",
        "dataset.folds=2", "dataset.folds=2: "),
    "one of the folds": (machine(0), "dataset.folds=2 dataset.fold=1",
        "dataset.folds=2 dataset.fold=2", "dataset.fold=2: "),
    "an objective that is measured": (machine(0), "objective=loss/train", "objective=loss",
        "objective=loss: "),
    "a metric that ends the run": (machine(0), "early_stop={metric:loss/train,patience:1}",
        "early_stop={metric:loss/test,patience:1}", "early_stop.metric=loss/test: "),
    "a metric that is new at each evaluation": (machine(0),
        "early_stop={metric:loss/val,threshold:0.1} eval_every_steps=9",
        "early_stop={metric:loss/train,patience:1} eval_every_steps=9",
        "early_stop.metric=loss/train: "),
    "an early stop that says when": (machine(0), "early_stop={metric:loss/val,threshold:0.0}",
        "early_stop={metric:loss/val,min_delta:0.1}", "early_stop.patience=null: "),
    "a metric that evaluations alone measure": (machine(0),
        "+task.metrics.auroc={_target_:torchmetrics.AUROC,better:max} "
        "early_stop={metric:auroc/val,patience:1}",
        "+task.metrics.auroc={_target_:torchmetrics.AUROC,better:max} "
        "early_stop={metric:auroc/train,patience:1}", "early_stop.metric=auroc/train: "),
    "a warm-up within the run": (machine(0), "epochs=5 scheduler.warmup_epochs=5.0",
        "epochs=5 scheduler.warmup_epochs=5.5", "scheduler.warmup_epochs=5.5: "),
    "a split that is evaluated": (machine(0), "eval_split=test objective=loss/test",
        "eval_split=test objective=loss/val", "objective=loss/val: "),
}  # fmt: skip


WORD = re.compile(r"[a-z_][\w.]*=(?:\[[^\]]*\]|[^\s;,')]+)")


@pytest.mark.parametrize(("on", "fine", "wrong", "begins"), EDGES.values(), ids=EDGES.keys())
def test_each_rule_at_its_edge_and_its_fix_works_as_it_is_typed(
    on: Machine, fine: str, wrong: str, begins: str
) -> None:
    assert problems(on, *fine.split()) == []
    (problem,) = problems(on, *wrong.split())
    assert problem.startswith(begins)
    key, fix = begins.partition("=")[0], problem.partition(": ")[2].rpartition("; ")[2]
    fix = re.sub("-m '[^']+'", "", fix)
    ways = [WORD.findall(way) for way in re.split(r",? or ", fix.partition(", which ")[0])]
    if meant := re.search(r"Did you mean '([^']+)'", problem):
        ways = [[f"{key}={meant[1]}"]]
    for words in filter(None, ways):
        settings: Any = composed(*wrong.split())
        for each in map(parse_one, words):
            settings = with_value(settings, each.key_or_group.split("."), each.value())
        parse(settings, on)


@pytest.mark.parametrize(
    "lists", ["kernels=[3]", "strides=[1,1,1,1]", "paddings=[]", "widths=[1,2]"]
)
def test_a_convolution_needs_each_of_its_settings(lists: str) -> None:
    (problem,) = problems(machine(), "model=convnet", f"model.{lists}")
    assert (problem[:13], problem[-15:]) == ("model.widths=", "; give each one")


TABLES = {
    "dataset=diabetes": ("task=classification: "),
    "dataset=diabetes task=multilabel": ("task=multilabel: "),
    "experiment=diabetes eval_split=test dataset.test_fraction=0": ("eval_split=test: "),
    "dataset=table dataset.path=t.csv dataset.targets=[a,b]": ("task=classification: "),
    "task=regression": ("task=regression: "),
}


@pytest.mark.parametrize(("words", "begins"), TABLES.items(), ids=TABLES.keys())
def test_tables_and_tasks_that_do_not_go_together(words: str, begins: str) -> None:
    assert problems(machine(), *words.split())[0].startswith(begins)


def test_parameters_that_are_trained_in_a_few_epochs_need_a_schedule_that_can_end() -> None:
    groups = "optimizer.groups=[{match:bias,epochs:3}]"
    for scheduler in ("constant", "cosine", "step", "one_cycle"):
        made = parse(composed(groups, f"scheduler={scheduler}"), machine())
        assert made.optimizer.groups[0].epochs == 3
    (problem,) = problems(machine(), groups, "scheduler=plateau")
    assert problem.startswith("scheduler.name=plateau: ")


@pytest.mark.parametrize("line", ["{name: cosine, min_lr: 0", "{name: linear"])
def test_a_group_s_own_schedule_needs_one_of_its_kind(line: str) -> None:
    """Or an end of its own: the run's schedule tells when the others end."""
    whole, ended = (
        f"optimizer.groups=[{{match: a, scheduler: {line}{more}}}}}]"
        for more in ("", ", epochs: 2")
    )
    for scheduler in ("cosine", "linear"):
        assert parse(composed(whole, f"scheduler={scheduler}"), machine()).optimizer.groups
    assert parse(composed(ended, "scheduler=step"), machine()).optimizer.groups
    for own, scheduler in ((whole, "step"), (ended, "one_cycle"), (ended, "plateau")):
        (problem,) = problems(machine(), own, f"scheduler={scheduler}")
        assert problem.startswith(f"scheduler.name={scheduler}: ")
        assert ("sets no end" in problem) == (own == whole)
