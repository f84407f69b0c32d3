"""A person's own source is known by what it says, without running it."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from pathlib import Path

import pytest

from expt.config import constraints, groups
from expt.config.identity import shown
from expt.config.user_code import fingerprint, import_anew, targets, targets_recorded
from expt.data.kinds.custom import Custom
from tests.conftest import Configured


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path, with a module, and a package of which one part imports another."""
    (tmp_path / "my_net.py").write_text(
        "import my_layers\nimport torch\nraise RuntimeError('was run')\n"
    )
    (tmp_path / "my_layers.py").write_text("WIDTH = 3\n")
    package = tmp_path / "my_package"
    (package / "deep").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('was run')\n")
    (package / "deep/__init__.py").write_text("")
    (package / "deep/net.py").write_text("from ..parts import Part\nfrom . import same\n")
    (package / "deep/same.py").write_text("")
    (package / "bare").mkdir()
    (package / "bare/net.py").write_text("")
    (package / "parts.py").write_text("class Part: ...\n")
    (package / "other.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "edited"),
    [
        ("my_net.Net", "my_net.py"),
        ("my_net.Net", "my_layers.py"),
        ("my_package.deep.net.Net", "my_package/deep/net.py"),
        ("my_package.deep.net.Net", "my_package/parts.py"),
        ("my_package.deep.net.Net", "my_package/deep/same.py"),
        ("my_package.deep.net.Net", "my_package/__init__.py"),
        ("my_package.bare.net.Net", "my_package/bare/net.py"),
    ],
)
def test_an_edited_source_is_another(own: Path, name: str, edited: str) -> None:
    before = fingerprint([name])
    assert before == fingerprint([name])
    assert before is not None
    with (own / edited).open("a") as file:
        file.write("# edited\n")
    assert fingerprint([name]) != before


def test_what_is_not_imported_does_not_count(own: Path) -> None:
    before = fingerprint(["my_package.deep.net.Net", "my_net.Net"])
    (own / "my_package/other.py").write_text("X = 1\n")
    assert fingerprint(["my_package.deep.net.Net", "my_net.Net"]) == before


def test_the_same_source_elsewhere_is_the_same(
    own: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    before = fingerprint(["my_net.Net"])
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for name in ("my_net.py", "my_layers.py"):
        (own / name).rename(elsewhere / name)
    assert fingerprint(["my_net.Net"]) is None
    sys.path.insert(0, str(elsewhere))
    try:
        assert fingerprint(["my_net.Net"]) == before
    finally:
        sys.path.remove(str(elsewhere))


@pytest.mark.parametrize(
    "name",
    ["torch.optim.RMSprop", "collections.OrderedDict", "no.such.Thing", "expt.models.mlp.MLP"],
)
def test_an_installed_class_is_known_by_its_version(name: str) -> None:
    assert fingerprint([name]) is None


def test_a_source_that_does_not_parse_counts_all_the_same(own: Path) -> None:
    (own / "my_net.py").write_text("def broken(:\n")
    before = fingerprint(["my_net.Net"])
    (own / "my_net.py").write_text("def broken((:\n")
    assert before != fingerprint(["my_net.Net"])


def test_what_was_imported_before_is_imported_anew(own: Path) -> None:
    name = "my_package.parts"
    (own / "my_package/__init__.py").write_text("")
    (own / "my_package/parts.py").write_text("from my_layers import WIDTH\n")
    assert importlib.import_module(name).WIDTH == 3
    (own / "my_layers.py").write_text(
        "WIDTH = 12345\n"
    )  # a file of another size, whose time may be the same
    import_anew([f"{name}.Part"])
    assert importlib.import_module(name).WIDTH == 12345


def test_the_classes_among_arguments_count_too(configured: Configured) -> None:
    optimizer = groups.TargetOptimizer(
        target="mine.Opt", kwargs={"inner": [{"_target_": "mine.Deep", "x": {"_target_": "a.B"}}]}
    )
    data = Custom(
        target="mine.Data",
        num_classes=2,
        kwargs={"transform": {"_target_": "mine.T"}},
        train={"x": {"_target_": "b.C"}},
    )
    callback = constraints.Target(target="mine.Watch", kwargs={"of": {"_target_": "d.D"}})
    config = dataclasses.replace(
        configured(), optimizer=optimizer, dataset=data, callbacks=(callback,)
    )
    found = targets(config)
    assert found == (
        "mine.Data",
        "mine.T",
        "b.C",
        "mine.Opt",
        "mine.Deep",
        "a.B",
        "mine.Watch",
        "d.D",
    )
    assert targets_recorded(json.loads(json.dumps(shown(config)))) == found, (
        "else such a run would be stale"
    )


def test_the_metrics_of_a_task_count_too(configured: Configured) -> None:
    config = configured(
        "+task.metrics.own={_target_: mine.Metric, better: max, of: {_target_: mine.Deep}}"
    )
    assert targets(config) == ("mine.Metric", "mine.Deep")
    assert targets_recorded(json.loads(json.dumps(shown(config)))) == targets(config), (
        "else such a run would be stale"
    )


def test_the_transforms_of_a_dataset_count_too(configured: Configured) -> None:
    config = configured(
        "dataset.transforms=[{_target_: mine.Noise}, {_target_: a.B, then: [{_target_:"
        " mine.Deep}]}]"
    )
    assert targets(config) == ("mine.Noise", "a.B", "mine.Deep")
    assert targets_recorded(json.loads(json.dumps(shown(config)))) == targets(config)
