"""Words that do not go together are refused before anything starts, each with what is said."""

import shlex

import pytest

from expt.errors import ConfigError
from tests.conftest import Configured

AUROC = "_target_: torchmetrics.classification.MulticlassAUROC"
TABLE = "task=regression dataset=table dataset.path=t.csv dataset.targets=y"
HF = "dataset=huggingface dataset.path=set"
ROWS = f"{HF} dataset.input=[a]"
MASKS = "task=segmentation dataset=segmentation_folder dataset.root=x dataset.num_classes=3"
V2 = "_target_: torchvision.transforms.v2"
CASES = {
    # what is said, by a shell's words
    "dataset.transforms='[{size: 3}]'": "dataset.transforms.0 names no class",
    f"dataset.transforms='[{{{V2}.Normalize, mean: [0.1], std: [0.1]}}]'": "dataset.transforms.0 "
    "would normalise training images only; give dataset.mean and dataset.std instead",
    f"dataset=image_folder dataset.root=x dataset.cache=true dataset.transforms='[{{{V2}.ToPure"
    "Tensor}]'": "dataset.cache=true: ",
    "dataset.transforms=3": "dataset.transforms=3",
    "dataset.transforms=[]": "dataset.transforms=[]: is empty; use dataset.transforms=null",
    f"{HF} dataset.standardise_targets=true": "dataset.standardise_targets=true: is of numbers",
    f"{ROWS} dataset.target=[y,z]": "dataset.target names 2 columns",
    f"{ROWS} dataset.image_size=[3,3]": "dataset.image_size and transforms: are of images",
    f"{ROWS} dataset.transforms='[{{_target_: a.B}}]'": "and transforms: are of images",
    f"{MASKS} task=classification": "dataset=segmentation_folder is for task=segmentation",
    "task=segmentation": "task=segmentation: dataset=digits is for task=classification",
    f"{MASKS} task.num_classes=4": "task.num_classes=4: dataset=segmentation_folder has 3",
    f"{MASKS} model=unet +dataset.augment.flip=true": "dataset.augment: moves images without their",
    f"{TABLE} task=multilabel dataset.standardise_targets=true": "=true: is of numbers to predict",
    "task.class_weights=[0,0]": "task.class_weights: all are 0",
    "task.class_weights=[1,-1]": "task.class_weights",
    "task='{_target_: a.B, metrics: {ranks: min}}' objective=ranks/val": "task.metrics.ranks: ",
    "mixup=0": "mixup=0",
    f"{TABLE} mixup=0.2": "mixup=0.2: works with task=classification only; use mixup=null",
    "task.class_weights=balanced dataset.sampling=balanced": "evens the classes out too; "
    "use one of them",
    f"{TABLE} dataset.sampling=balanced": "=balanced: works with task=classification only",
    f"+task.metrics.x='{{{AUROC}}}'": "task.metrics.x.better: has no value; give one",
    f"+task.metrics.x='{{{AUROC}, better: up}}'": "task.metrics.x.better=up: input",
    f"+task.metrics.accuracy='{{{AUROC}, better: max}}'": "task.metrics.accuracy: the task",
    "+task.metrics.f1=min": "task.metrics.f1=min: task=classification has no",
    "experiment=diabetes +task.metrics.f1=max": "task.metrics.f1=max: task=regr",
    f"+task.metrics.x='{{{AUROC}, better: max}}' objective=x/train": "=x/train: is not measured",
    **{
        f"optimizer=lbfgs {word}": f"{word}: optimizer=lbfgs"
        for word in ("amp=fp16", "on_nan=skip", "strategy=fsdp", "strategy=hsdp", "offload=cpu")
    },
}


@pytest.mark.parametrize("words", CASES)
def test_what_does_not_go_together(words: str, configured: Configured) -> None:
    with pytest.raises(ConfigError) as refused:
        configured(*shlex.split(words))
    assert CASES[words] in str(refused.value)
