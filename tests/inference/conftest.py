"""Small runs that several tests ask, and their models by plain torch."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

import expt
from expt.config.identity import shown
from expt.config.schema import RunConfig
from expt.runs.paths import RunPaths
from expt.runs.result import update_result
from expt.worker.run import Run
from tests.conftest import Configured
from tests.facade import as_typed, request_of
from tests.inference.test_load import FEW, masks_in, words
from tests.worker.conftest import ALONE

SHORT = (*FEW[:3], "tensorboard.images=false")
CLASSES = ("=sum(A1)", "cat")
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
Weights = dict[str, Tensor]


class Made(NamedTuple):
    """A run, and what it was trained on."""

    folder: Path
    data: Path
    run: Run

    @property
    def weights(self) -> Weights:
        """Of the best epoch, by safetensors alone."""
        tensors = load_file(RunPaths(self.folder).best)
        return {name[6:]: one for name, one in tensors.items() if name.startswith("model.")}


def mlp(weights: Weights, inputs: Tensor) -> Tensor:
    """What an MLP of these weights gives."""
    tensors = list(weights.values())
    for weight, bias in zip(tensors[:-2:2], tensors[1:-2:2], strict=True):
        inputs = functional.linear(inputs, weight, bias).relu()
    return functional.linear(inputs, *tensors[-2:])


@pytest.fixture(scope="session")
def make(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[str, RunConfig, Path], Made]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def train(name: str, config: RunConfig, data: Path) -> Made:
        paths = RunPaths(tmp_path_factory.mktemp(name))
        run = Run(request_of(config, paths.folder), ALONE)
        update_result(paths, status="running", config=shown(config))
        run.train()
        return Made(paths.folder, data, run)

    yield train
    torch.set_num_threads(threads)


Make = Callable[[str, RunConfig, Path], Made]


@pytest.fixture(scope="session")
def photos(make: Make, configured: Configured, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Of two classes, one of which a spreadsheet would take for a formula."""
    root = tmp_path_factory.mktemp("photos[1]")
    for part, number in (("train", 4), ("test", 3)):
        for place, name in enumerate(CLASSES):
            (root / part / name).mkdir(parents=True)
            for index in range(number):
                pixels = np.random.default_rng([index, place]).integers(
                    0, 256, (12, 16, 3), np.uint8
                )
                Image.fromarray(pixels).save(root / part / name / f"{index}.png")
    folder = (
        *as_typed(f"dataset=image_folder dataset.root='{root}' dataset.image_size=[12,16]"),
        "dataset.cache=false",
    )
    normalised = (f"dataset.mean={list(MEAN)}", f"dataset.std={list(STD)}")
    config = configured(
        *SHORT, *folder, *normalised, "batch_size=2", "model=mlp", "model.hidden=[5]", "amp=false"
    )
    return make("photo_run[1]", config, root)


@pytest.fixture(scope="session")
def patients(make: Make, configured: Configured) -> Made:
    """Targets in standard deviations."""
    words = ("experiment=diabetes", "dataset.standardise_targets=true", "model.hidden=[7]")
    return make(
        "patients", configured(*SHORT, *words), Path(expt.__file__).parent / "data" / "diabetes.csv"
    )


@pytest.fixture(scope="session")
def segmented(make: Make, configured: Configured, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Pictures of 10x30 in classes 0 and 1, which the model sees as 16x8."""
    root = masks_in(tmp_path_factory.mktemp("masks"))
    return make(
        "segmented", configured(*words("unet"), f"dataset.root={root}", "batch_size=2"), root
    )
