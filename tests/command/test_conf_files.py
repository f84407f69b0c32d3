"""What is known of the YAML that expt ships."""

from __future__ import annotations

from expt.command import conf_files


def test_groups_and_their_options_are_those_of_the_folders() -> None:
    assert {"model", "dataset", "optimizer", "scheduler", "sweep", "experiment", "init"} <= set(
        conf_files.groups()
    )
    assert {"convnet", "mlp", "resnet18"} <= {path.stem for path in conf_files.options("model")}
    assert all((conf_files.conf_dir() / group).is_dir() for group in conf_files.groups())


def test_keys_are_all_that_may_be_set() -> None:
    keys = set(conf_files.keys())
    assert {
        "epochs",
        "model",
        "checkpoint.keep",
        "model.hidden",
        "optimizer.lr",
        "dataset.augment.flip",
    } <= keys
    assert not {key for key in keys if key.startswith(("hydra", "defaults"))}
