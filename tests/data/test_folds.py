"""Cross-validation: the folds' validation parts are all training samples, each once."""

from typing import Any

import pytest
import torch

from expt.data.build import Data
from expt.data.indexing import split_fold
from expt.errors import ConfigError
from tests.facade import built, dataset


@pytest.mark.parametrize(("size", "folds"), [(442, 5), (7, 7), (10, 3)])
def test_each_sample_validates_once_and_each_fold_has_its_share_of_every_class(
    size: int, folds: int
) -> None:
    classes = torch.arange(size) % 3 * 7  # sorted neither by index nor without gaps
    parts = [split_fold(classes, folds, fold, None) for fold in range(folds)]
    everything = list(range(size))
    assert torch.cat([val for _, val in parts]).sort().values.tolist() == everything
    for train, val in parts:
        assert torch.cat([train, val]).sort().values.tolist() == everything
        assert val.equal(val.sort().values)
        assert train.equal(train.sort().values)
    for counts in (
        torch.stack([(classes[val] == each).sum() for _, val in parts]) for each in (0, 7, 14)
    ):
        assert counts.max() - counts.min() <= 1
    assert {len(val) for _, val in parts} <= {size // folds, -(-size // folds)}


def digits(**options: Any) -> Data:
    return built(dataset("dataset=digits", **options), batch_size=64, drop_last=True)


def test_images_have_folds_of_equal_classes_and_the_test_set_stays() -> None:
    found, tests = [], []
    for fold in range(4):
        data = digits(folds=4, fold=fold)
        assert data.val is not None
        assert data.test is not None
        found.append(torch.cat([batch.targets for batch in data.val.evaluation()]).bincount())
        tests.append(torch.cat([batch.inputs for batch in data.test.evaluation()]))
        assert data.info.val_size is not None
        assert (data.info.train_size + data.info.val_size, data.info.test_size) == (1437, 360)
    counts = torch.stack(found)
    assert (counts.max(0).values - counts.min(0).values).max() <= 1
    assert counts.sum() == 1437
    assert all(each.equal(tests[0]) for each in tests)
    assert digits(folds=4, fold=0, train_limit=100).info.train_size == 100


def test_more_folds_than_samples_are_refused() -> None:
    with pytest.raises(ConfigError, match="folds=1438: there are 1437 training samples"):
        digits(folds=1438, fold=0)
