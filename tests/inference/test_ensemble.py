"""The mean of several runs, and of mirror images, against numpy on each run's own predictions."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import expt
from expt.command import predict, trained_runs
from expt.errors import ConfigError
from expt.features import Numbers
from expt.runs.paths import RunPaths
from expt.runs.request import Trained
from expt.runs.result import read_result
from expt.runs.view.text import Console
from expt.tasks.classification import Classification
from expt.tasks.language_model import LanguageModel
from expt.tasks.multilabel import Multilabel
from expt.tasks.regression import Regression
from expt.tasks.segmentation import Segmentation
from expt.tasks.task import Task
from tests.conftest import Configured
from tests.inference.conftest import MEAN, SHORT, STD, Made, Make, mlp


class Custom(Task):
    def loss(self, outputs: Any, batch: Any) -> Any:
        return outputs["a"].sum(), 1


PROBABILITIES: dict[str, tuple[Task, tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "classes": (Classification(), (5, 4), lambda logits: logits.softmax(1)),
    "labels": (Multilabel(0.4), (5, 4), torch.sigmoid),
    "numbers": (Regression(), (5, 2), lambda outputs: outputs),
    "masks": (Segmentation(3), (5, 3, 4, 2), lambda logits: logits.softmax(1)),
    "tokens": (LanguageModel(), (5, 6, 7), lambda logits: logits.softmax(-1)),
}


@pytest.mark.parametrize("name", PROBABILITIES)
def test_mean_outputs_have_the_mean_probabilities_or_values(name: str) -> None:
    task, shape, predicted = PROBABILITIES[name]
    several = [*torch.randn(3, *shape, generator=torch.Generator().manual_seed(3)) * 9]
    expected = torch.stack([predicted(each.double()) for each in several]).mean(0)
    found = task.mean_outputs(several)
    torch.testing.assert_close(predicted(found).double(), expected, rtol=1e-5, atol=1e-7)
    again = task.mean_outputs([several[0], several[0]])
    torch.testing.assert_close(predicted(again), predicted(several[0]), rtol=1e-5, atol=1e-7)


def test_logits_that_are_certain_stay_finite() -> None:
    certain = [torch.tensor([[200.0, -200.0]]), torch.tensor([[150.0, -300.0]])]
    assert Multilabel().mean_outputs(certain).isfinite().all()
    assert Classification().mean_outputs(certain).isfinite().all()


def test_tensors_of_a_custom_tasks_outputs_are_averaged() -> None:
    several = [{"a": torch.ones(2) * n, "b": (torch.zeros(3), torch.ones(1) * n)} for n in (1, 4)]
    found = Custom().mean_outputs(several)
    assert found["a"].tolist() == [2.5, 2.5]
    assert [each.tolist() for each in found["b"]] == [[0, 0, 0], [2.5]]


def test_integers_have_a_mean_only_where_all_are_equal() -> None:
    several = [{"logit": torch.ones(2) * n, "at": torch.arange(2)} for n in (1, 4)]
    assert Custom().mean_outputs(several)["at"].tolist() == [0, 1]
    with pytest.raises(ConfigError, match="mean_outputs"):
        Custom().mean_outputs([each["logit"] > 2 for each in several])


@pytest.fixture(scope="session")
def other_photos(make: Make, photos: Made) -> Made:
    """A run like `photos` of another seed."""
    return make("photo_run_2", dataclasses.replace(photos.run.config, seed=5), photos.data)


def chances(found: Sequence[dict[str, Any]]) -> np.ndarray:
    return np.array([[*record["probabilities"].values()] for record in found])


def test_predictions_of_several_runs_are_their_mean(
    photos: Made, other_photos: Made, tmp_path: Path
) -> None:
    runs, data = [photos.folder, other_photos.folder], photos.data / "test"
    single = [chances(expt.predict(run, data)) for run in runs]
    assert np.abs(single[0] - single[1]).max() > 1e-3
    found = expt.predict(runs, data)
    np.testing.assert_allclose(chances(found), np.mean(single, 0), rtol=1e-6, atol=1e-8)
    file = tmp_path / "mean.npz"
    assert predict.main([*map(str, [*runs, data]), "--output", str(file)]) == 0
    with np.load(file) as written:
        np.testing.assert_allclose(written["probabilities"], np.mean(single, 0), rtol=1e-6)
        assert {*written.files} == {"path", "class", "probabilities", "class_names"}
    split = [chances(expt.predict(run, split="val")) for run in runs]
    found = expt.predict(runs, split="val")
    np.testing.assert_allclose(chances(found), np.mean(split, 0), rtol=1e-6, atol=1e-8)


def test_flips_average_over_mirror_images(photos: Made) -> None:
    paths = sorted((photos.data / "test").rglob("*.png"))
    pixels = np.stack([np.asarray(Image.open(path)) for path in paths])
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255
    images = (images - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    both = [mlp(photos.weights, each.flatten(1)).softmax(1) for each in (images, images.flip(-1))]
    found = expt.predict(photos.folder, photos.data / "test", flips=True)
    np.testing.assert_allclose(chances(found), torch.stack(both).mean(0), rtol=1e-5)


def test_masks_of_mirror_images_are_flipped_back(segmented: Made) -> None:
    model = expt.load(segmented.folder)
    picture = segmented.data / "test" / "images" / "a.png"
    inputs = model.preprocess(picture)
    with torch.no_grad():
        both = [model(inputs), model(inputs.flip(-1)).flip(-1)]
    expected = torch.stack([each.softmax(1) for each in both]).mean(0).argmax(1)[0]
    (found,) = expt.predict(segmented.folder, picture, flips=True)
    assert found["mask"].tolist() == expected.tolist()


@pytest.fixture(scope="session")
def folds(make: Make, patients: Made) -> list[Path]:
    """Runs of two folds: each standardises by its own training rows."""
    made = []
    for fold in (0, 1):
        dataset = dataclasses.replace(patients.run.config.dataset, folds=2, fold=fold)
        config = dataclasses.replace(patients.run.config, dataset=dataset)
        made.append(make(f"fold_{fold}", config, patients.data).folder)
    return made


def values(found: Sequence[dict[str, Any]]) -> np.ndarray:
    return np.array([record["progression"] for record in found])


def test_a_mean_of_short_floats_is_not_rounded_to_them(patients: Made, make: Make) -> None:
    config = dataclasses.replace(patients.run.config, seed=5)
    runs = [patients.folder, make("other seed", config, patients.data).folder]
    each = [values(expt.predict(run, patients.data, amp="bf16")) for run in runs]
    mean = values(expt.predict(runs, patients.data, amp="bf16"))
    np.testing.assert_allclose(mean, np.mean(each, 0), rtol=1e-5)


@pytest.mark.slow
def test_folds_are_averaged_in_units_and_val_is_predicted_out_of_fold(
    folds: list[Path], patients: Made
) -> None:
    scales = [Numbers.read(read_result(RunPaths(run))["data"]["targets"]).scales for run in folds]
    assert scales[0] != scales[1]
    for how in ({"paths": patients.data}, {"split": "test"}):
        single = [values(expt.predict(run, **how)) for run in folds]
        mean = values(expt.predict(folds, **how))
        np.testing.assert_allclose(mean, np.mean(single, 0), atol=2e-4)
    own = [expt.predict(run, split="val") for run in folds]
    found = expt.predict(folds, split="val")
    assert [record["row"] for record in found] == [each["row"] for run in own for each in run]
    np.testing.assert_allclose(values(found), np.concatenate([*map(values, own)]), atol=2e-4)
    assert [record["target"] for record in found] == [each["target"] for run in own for each in run]
    with pytest.raises(ConfigError, match=r"dataset.fold"):
        expt.predict(folds, split="train")


def test_numbers_are_averaged_and_not_their_logarithms(make: Make, patients: Made) -> None:
    """Of folds with scales of their own, too."""
    made = []
    for how, fold in (("log", 0), ("log", 1), ("log1p", 1)):
        changes = {"folds": 2, "fold": fold, "target_transform": how}
        dataset = dataclasses.replace(patients.run.config.dataset, **changes)
        for seed in (0, 1) if fold == 0 else (0,):
            config = dataclasses.replace(patients.run.config, dataset=dataset, seed=seed)
            made.append(make(f"{how}_{fold}_{seed}", config, patients.data).folder)
    for runs in (made[:2], made[1:3]):
        single = [values(expt.predict(run, patients.data)) for run in runs]
        assert np.ptp(single, axis=0).max() > 1
        mean = values(expt.predict(runs, patients.data))
        np.testing.assert_allclose(mean, np.mean(single, 0), rtol=1e-5)
    with pytest.raises(ConfigError, match=r"has the targets .*transform log1p"):
        expt.predict(made[2:], patients.data)


def test_a_custom_tasks_outputs_without_a_mean_are_refused() -> None:
    integers = [{"a": torch.tensor([1])}, {"a": torch.tensor([2])}]
    of_other_shapes = [[torch.zeros(1)], [torch.zeros(2)]]
    of_other_lengths = [[torch.zeros(1)], [torch.zeros(1), torch.zeros(1)]]
    for several in (integers, of_other_shapes, of_other_lengths):
        with pytest.raises(ConfigError, match=r"Custom.*mean_outputs"):
            Custom().mean_outputs(several)


def test_a_run_that_is_named_twice_counts_once(photos: Made) -> None:
    again = photos.folder.parent / "." / ".." / photos.folder.parent.name / photos.folder.name
    words = [str(photos.folder), str(again)]
    chosen = trained_runs.chosen(words, None, Console())
    assert chosen == [(photos.folder, "best")]


def test_checkpoints_of_one_run_are_told_apart(photos: Made) -> None:
    labels = [Trained.read(photos.folder, which).label for which in ("best", "last")]
    assert labels == [str(photos.folder), f"{photos.folder}@last"]


def test_unlike_runs_are_refused_by_name(
    photos: Made, patients: Made, segmented: Made, make: Make, configured: Configured
) -> None:
    for one, wrong in ((patients, "task"), (segmented, "task")):
        with pytest.raises(ConfigError, match=rf"{one.folder.name}.* has the {wrong} "):
            expt.predict([photos.folder, one.folder], photos.data)
    with pytest.raises(ConfigError, match=r"--flips: .*patients"):
        expt.predict(patients.folder, patients.data, flips=True)
    table = (f"dataset.path={patients.data}", "dataset.targets=progression", "model.hidden=[7]")
    words = ("dataset=table", "task=regression", *table, "dataset.features=[bmi,age]")
    scaled = ("dataset.standardise_targets=true",)
    other = make("fewer", configured(*SHORT, *words, *scaled), patients.data)
    with pytest.raises(ConfigError, match=r"fewer.* has the inputs columns"):
        expt.predict([patients.folder, other.folder], patients.data)
