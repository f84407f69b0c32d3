"""What an earlier command of the process has composed: the next gets what Hydra would compose of
its own words.
"""

from __future__ import annotations

import copy
import itertools
import operator
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra import initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig

from expt.command import hydra_composing, hydra_words
from expt.command.conf_files import conf_dir
from expt.command.hydra_composing import Kept, chosen_once, sources_shared
from expt.command.overrides import register_resolvers
from tests.command.test_point_composer import outcome

RUN = [
    "+new.a=2",
    "new.a=3",
    "model=convnet",
    "seed=3",
    "++seed=9",
    "optimizer={lr: 0.5}",
    "hydra.run.dir=x",
]
RUN += ["hydra.job.env_copy=[HOME]", "~log_every", "epochs=${seed}", "optimizer=adamw"]
SWEEP = [
    "seed=1,2",
    "model=mlp,convnet",
    "optimizer=adamw",
    "epochs=3",
    "+more=1",
    "hydra.mode=MULTIRUN",
]


def composed(words: list[str], mode: RunMode = RunMode.RUN, conf: Path | None = None) -> DictConfig:
    register_resolvers()
    with initialize_config_dir(str(conf or conf_dir()), version_base="1.3"):
        return GlobalHydra.instance().config_loader().load_configuration("config", words, mode)


@pytest.fixture
def merged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that Hydra merges, one after another."""
    names, real = list[str](), ConfigLoaderImpl._load_single_config

    def load(self: ConfigLoaderImpl, default: Any, repo: Any) -> Any:
        names.append(str(default.config_path))
        return real(self, default, repo)

    monkeypatch.setattr(ConfigLoaderImpl, "_load_single_config", load)
    return names


@pytest.mark.parametrize(
    ("words", "mode"), [(RUN, RunMode.RUN), (SWEEP, RunMode.MULTIRUN)], ids=["run", "sweep"]
)
def test_a_command_that_chooses_the_same_gets_what_hydra_composes(
    words: list[str], mode: RunMode, merged: list[str]
) -> None:
    def nodes() -> Any:  # without what `${now:}` was
        return outcome(lambda: composed(words, mode))[0]

    expected, kept = nodes(), Kept(())
    assert isinstance(expected, list), expected
    with chosen_once(kept):
        first = nodes()
    merged.clear()
    with chosen_once(kept):  # the first has changed its own copy
        assert first == nodes() == expected
        assert not merged
        choices = [word for word in words if word in ("model=convnet", "optimizer=adamw")]
        assert composed(["seed=7", *choices], mode).seed == 7, "other values"
        assert not merged
        assert composed(["optimizer=sgd"], mode).optimizer.name == "sgd"
        assert "optimizer/sgd" in merged


def test_copies_of_where_it_looks_share_the_sources_and_what_one_finds_besides_is_its_own(
    tmp_path: Path,
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("defaults: [mlp]\nhidden: [3]\n")
    mine = ["model=mine", f"hydra.searchpath=['file://{tmp_path}']"]
    register_resolvers()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        loader: Any = GlobalHydra.instance().config_loader()
        with sources_shared():
            copied = copy.deepcopy(loader.repository)
            assert all(map(operator.is_, copied.sources, loader.repository.sources))
            assert loader.load_configuration("config", mine, RunMode.RUN).model.hidden == [3]
            with pytest.raises(MissingConfigException):
                loader.load_configuration("config", mine[:1], RunMode.RUN)
            assert copied.sources is not loader.repository.sources
        assert not any(
            map(operator.is_, copy.deepcopy(loader.repository).sources, loader.repository.sources)
        )


def test_each_command_has_a_time_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, clock = Kept(()), itertools.count()
    now = SimpleNamespace(strftime=lambda _: str(next(clock)))
    monkeypatch.setattr("hydra.core.utils.datetime", SimpleNamespace(now=lambda: now))
    with chosen_once(kept):
        times = [
            composed(["resume='${now:%H-%M-%S}'", "objective='${now:%H-%M-%S}'"]) for _ in range(3)
        ]
    assert all(each.resume == each.objective for each in times)
    assert len({each.resume for each in times}) == 3


@pytest.mark.parametrize(
    "words", [["model=mpl"], ["nosuch=1"], ["++model=mlp"], ["seed=1,2"]], ids="".join
)
def test_a_mistake_is_told_as_hydra_tells_it(words: list[str]) -> None:
    kept = Kept(())
    with chosen_once(kept):
        composed([])
        assert outcome(lambda: composed(words)) == outcome(lambda: composed(words))
        found = outcome(lambda: composed(words))
    assert found == outcome(lambda: composed(words))
    assert isinstance(found[0], type)


def test_an_edited_file_is_read_again_and_a_persons_own_always(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, merged: list[str]
) -> None:
    shipped = shutil.copytree(conf_dir(), tmp_path / "conf")
    monkeypatch.setattr(hydra_composing, "conf_dir", lambda: shipped)
    monkeypatch.setattr(hydra_composing, "_kept", None)
    own = tmp_path / "own" / "model" / "mine.yaml"
    own.parent.mkdir(parents=True)
    mine = ["model=mine", f"hydra.searchpath=['file://{tmp_path / 'own'}']"]

    def hidden(words: list[str], text: str, path: Path) -> list[int]:
        path.write_text(text)
        with hydra_composing.composing_sooner():
            return [*composed(words, conf=shipped).model.hidden]

    mlp = shipped / "model" / "mlp.yaml"
    text = mlp.read_text()
    assert hidden([], text, mlp) == [256]
    merged.clear()
    with hydra_composing.composing_sooner():
        composed(["seed=1"], conf=shipped)
    assert not merged
    assert hidden([], text.replace("[256]", "[128]"), mlp) == [128]
    for size in (3, 4):
        assert hidden(mine, f"defaults: [mlp]\nhidden: [{size}]\n", own) == [size]


def test_a_run_goes_on_where_hydra_composes_in_another_way(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hydra_words.changed.cache_clear()
    with monkeypatch.context() as patch:
        patch.delattr(ConfigLoaderImpl, "_compose_config_from_defaults_list")
        with chosen_once(Kept(())):
            pass
    assert (
        "this version of Hydra composes in another way; a run may start a moment later"
        in capsys.readouterr().err
    )
