"""Parameters that are not trained."""

import pytest
from torch import nn

from expt.errors import ConfigError
from expt.models.build import freeze


def model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), nn.Linear(3, 2)
    )


@pytest.mark.parametrize(
    ("patterns", "left"),
    [
        ([], "0.weight 0.bias 1.0.weight 1.0.bias 1.1.weight 1.1.bias 2.weight 2.bias"),
        (["^0", r"1\.1"], "1.0.weight 1.0.bias 2.weight 2.bias"),
        (["bias$"], "0.weight 1.0.weight 1.1.weight 2.weight"),
    ],
)
def test_what_matches_is_not_trained(patterns: list[str], left: str) -> None:
    module = model()
    freeze(module, patterns)
    assert [
        name for name, parameter in module.named_parameters() if parameter.requires_grad
    ] == left.split()


@pytest.mark.parametrize(
    ("patterns", "says"),
    [
        (["1.0.wight"], "freeze=1.0.wight: is in no parameter's name. Did you mean '1.0.weight'?"),
        (["^0", "xyz"], "freeze=xyz: is in no parameter's name. There are 8, such as 0.weight, "),
        (["weight", "bias"], "freeze=[weight,bias]: leaves no parameter to train; freeze fewer"),
    ],
)  # fmt: skip
def test_what_matches_nothing_or_all_is_refused(patterns: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        freeze(model(), patterns)
    assert str(refused.value).startswith(says)
