"""Which values of a sweep no run can have, told before any starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hydra import compose, initialize_config_dir

from expt.command import sweep_values
from expt.command.conf_files import conf_dir, groups
from expt.command.overrides import register_resolvers
from expt.command.sweep_values import refuse_wrong_values
from expt.errors import ConfigError
from expt.machine import Machine

Refused = Callable[..., tuple[str, ...]]


@pytest.fixture
def refused() -> Iterator[Refused]:
    """`refused(["epochs=1"], ["epochs=x"])`: what is wrong with these points, by their values
    alone.
    """
    register_resolvers()

    def problems(*points: list[str]) -> tuple[str, ...]:
        try:
            refuse_wrong_values(
                points,
                compose("config", points[0], return_hydra_config=True),
                Machine(gpus=(), cpus=2),
                {*groups(), "recipe"}.__contains__,
            )
        except ConfigError as error:
            return error.problems
        return ()

    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        yield problems


def test_each_wrong_value_is_told_once(refused: Refused) -> None:
    points = [
        [f"optimizer.lr={lr}", f"seed={seed}"] for lr in ("0.1", "abc", "-1") for seed in (0, -1)
    ]
    assert refused(*points) == (
        "optimizer.lr='abc': input should be a valid number",
        "optimizer.lr=-1: input should be greater than 0",
        "seed=-1: input should be greater than or equal to 0",
    )
    assert refused(["gpus=x"], ["gpus=0"]), "the first point's too"
    assert refused(["model.hidden=[4]"], ["model.hidden=[4,x]"]) == (
        "model.hidden='x': input should be a valid integer",
    )


def test_what_a_mapping_does_not_name_stays(refused: Refused) -> None:
    assert not refused(
        ["tensorboard={images: false}", "seed=1"], ["tensorboard={norms: false}", "seed=2"]
    )
    assert not refused(["dataset={train_limit: 64}"], ["optimizer={groups: [{match: x, lr: 0.1}]}"])
    (wrong,) = refused(["tensorboard={images: 3, norms: true}"])
    assert wrong.startswith("tensorboard.images=3: input should be ")


def test_what_only_some_points_cannot_have_is_left_to_them(refused: Refused) -> None:
    assert not refused(
        ["batch_size=64", "world_size=2"], ["batch_size=63", "world_size=2"], ["gpus=0"], ["gpus=4"]
    )
    assert not refused(
        ["batch_size=64"], ["batch_size='32 per worker'"], ["world_size=auto"], ["seed=${epochs}"]
    )
    own = ["model.kernels=3", "hydra.verbose=x", "~sweep"]
    assert not refused(["model=mlp", "seed=0"], ["model=convnet", "seed=0", *own]), (
        "convnet may take another type"
    )
    assert not refused(
        ["seed=0"], ["experiment=ddp_mlp", "model.hidden=x"], ["experiment=d2l_resnet18"]
    )
    assert refused(["seed=0"], ["model.hidden=x"])


def test_a_group_of_ones_own_may_set_anything(refused: Refused) -> None:
    assert not refused(["+recipe=a", "model.hidden=[3]"], ["+recipe=b", "model.hidden=x"])
    assert refused(["+recipe=a", "model.hidden=[3]"], ["+recipe=a", "model.hidden=x"]), (
        "of one choice it is known"
    )
    assert refused(["+recipe=a", "seed=0"], ["+recipe=b", "seed=-1"])


def test_a_long_list_of_values_takes_no_longer(
    refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_values, "MAX_VALUES", 3)
    assert len(refused(*([f"seed={-seed}"] for seed in range(9)), ["epochs=x"])) == 3
