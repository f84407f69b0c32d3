"""What is known of the YAML that expt ships."""

from __future__ import annotations

import io

import pytest
import yaml
from expt.command.libyaml import parsed_by_libyaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

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


def test_libyaml_reads_every_file_as_omegaconf_does(monkeypatch: pytest.MonkeyPatch) -> None:
    for path in conf_files.conf_dir().rglob("*.yaml"):
        expected = OmegaConf.to_yaml(OmegaConf.load(path))
        with parsed_by_libyaml(), monkeypatch.context() as patch:
            patch.setattr(yaml.SafeLoader, "compose_document", None)  # of the parser in Python
            assert OmegaConf.to_yaml(OmegaConf.load(path)) == expected


ODD = "a: 1_0\nb: 1e3\nc: 2020-01-01\nd: 1:30\ne: on\nf: ~\ng: .5\nh: 'it''s'\ni: \"\\u00e9\"\n"
MISTAKES = ("a: [1", "a: 1\na: 2\n", "a:\n\tb: 1", "a: 'x", "a: @b", "a: !own b")


@pytest.mark.parametrize("text", [ODD, "", "- a\n- b", *MISTAKES])
def test_libyaml_gives_the_same_values_and_messages(text: str) -> None:
    def outcome() -> object:
        try:
            return OmegaConf.load(io.StringIO(text))
        except (yaml.YAMLError, OmegaConfBaseException) as error:
            return type(error), str(error)

    expected = outcome()
    with parsed_by_libyaml():
        assert outcome() == expected
