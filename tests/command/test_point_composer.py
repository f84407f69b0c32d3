"""A sweep's points: what is made of a copy is what Hydra composes, for every kind of word."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from hydra import initialize_config_dir
from hydra._internal.callbacks import Callbacks
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult
from hydra.types import HydraContext, RunMode
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import Container, DictConfig, ListConfig, Node, OmegaConf
from omegaconf.errors import ConfigAttributeError

from expt.command import hydra_adapter, hydra_words, point_composer
from expt.command.conf_files import conf_dir, options
from expt.command.hydra_composing import Kept, read_once
from expt.command.overrides import register_resolvers
from expt.command.point_composer import PointComposer
from expt.config.auto import fill_auto_of_a_sweep
from expt.config.parse import plain
from tests.composing import ALONE, _piece


@pytest.fixture(scope="module")
def loader() -> Iterator[ConfigLoader]:
    register_resolvers()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"), read_once(Kept(())):
        yield GlobalHydra.instance().config_loader()


def context_and_master(loader: ConfigLoader, *words: str) -> tuple[HydraContext, DictConfig]:
    """What a launcher is given for a sweep."""
    master = loader.load_configuration(
        "config", [f"hydra.sweep.dir={os.devnull}", *words], RunMode.MULTIRUN
    )
    return HydraContext(config_loader=loader, callbacks=Callbacks()), master


def test_a_sweeper_checks_what_is_new_alone(loader: ConfigLoader) -> None:
    context, master = context_and_master(loader)
    composer = PointComposer(context, master)
    checked = context.config_loader.load_sweep_config(master, ["seed=0", "model=mlp"])
    assert (checked.seed, checked.model.name) == (0, "mlp")
    seen = context.config_loader.load_sweep_config(master, ["seed=1", "model=mlp"])
    with pytest.raises(ConfigAttributeError):
        _ = seen.seed
    context.config_loader.load_sweep_config(master, ["seed=2", "tensorboard={images:false}"])
    keys = ["seed=2", "tensorboard={imagez:false}"]
    for mistake in (
        keys,
        ["seed=2", "model=mpl"],
        ["seeed=2", "model=mlp"],
        ["seed=[", "model=convnet"],
    ):
        with pytest.raises(HydraException):
            context.config_loader.load_sweep_config(master, mistake)
    assert composer.compose(master, ["seed=1", "model=mlp"]).seed == 1
    assert composer.compose(master, ["seed=1", "model=mlp"]) is not composer.compose(
        master, ["seed=1", "model=mlp"]
    )


def test_the_second_loader_knows_all_that_hydras_does(loader: ConfigLoader) -> None:
    context, master = context_and_master(loader)
    PointComposer(context, master)
    assert context.config_loader is not loader
    assert context.config_loader.get_group_options("model") == loader.get_group_options("model")
    # and it is as it was
    assert loader.load_sweep_config.__self__ is loader  # type: ignore[attr-defined]


def test_a_sweeper_that_may_look_at_what_is_composed_is_given_hydras_own(
    loader: ConfigLoader,
) -> None:
    context, master = context_and_master(loader)
    master.hydra.runtime.choices["hydra/sweeper"] = "optuna"
    composer = PointComposer(context, master)
    assert context.config_loader is loader
    assert composer.compose(master, ["seed=3"]).seed == 3


@pytest.mark.parametrize("searched", [False, True])
def test_groups_are_found_without_reading_a_file_and_where_the_primary_one_says(
    loader: ConfigLoader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, searched: bool
) -> None:
    from hydra._internal.core_plugins.file_config_source import (
        FileConfigSource,
    )  # Hydra imports its plugins anew

    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "a.yaml").touch()
    read, real = list[str](), FileConfigSource.load_config

    def load_config(self: FileConfigSource, config_path: str) -> ConfigResult:
        read.append(config_path)
        found = real(self, config_path)
        if searched and config_path == "config":
            cast(DictConfig, found.config).hydra.searchpath = [f"file://{tmp_path}"]
        return found

    monkeypatch.setattr(FileConfigSource, "load_config", load_config)
    context, master = context_and_master(loader)
    composer = PointComposer(context, master)
    read.clear()
    assert composer.is_group(master, "model")
    assert composer.is_group(master, "own") is searched
    assert read == ["config", "config"] * searched


WORDS = (
    "seed=3", "optimizer.lr=0.1", "optimizer.lr=1e-3", "optimizer.lr=.inf", "amp=true", "amp=null", "amp='true'",
    'experiment_name="a,b=c"', "resume='it''s'", "resume=é 😀", "resume=???", "resume=a\\,b", "seed=${batch_size}",
    "optimizer.lr=${oc.env:HOME}", "resume=${now:%H}", "resume=${hydra:job.num}", "resume=${hydra.job.num}",
    "resume='${seed}'", "resume=\\${seed}", "gpus=[0,1]", "gpus=[]", "gpus=[${seed}]", "model.hidden=[7,8]",
    "model={hidden:[3]}", "optimizer={lr:0.5}", "model=null", "optimizer=5", "model.hidden.0=4", "model.hidden[0]=4",
    "+model.new=1", "+new={a:{b:1}}", "+new.a=2", "++new.a=3", "++seed=9", "+seed=1", "new.a=4", "~resume",
    "~optimizer.lr", "~optimizer.lr=0.2", "~model", "~scheduler", "~nosuch", "seed={a:1}", "nosuch=1",
    "optimizer.nosuch=1", "model=mlp", "model=convnet", "model=nosuch", "optimizer=adamw", "dataset=mnist",
    "scheduler=cosine", "sweep=nosuch", "+model@other=mlp", "model@other=mlp", "model=[mlp]", "hydra/launcher=pool",
    "hydra.job.name=other", "hydra.job.env_set={A:b}", "+hydra.job.env_set.B=${seed}",
    "hydra.job.config.override_dirname.exclude_keys=[seed]", "hydra={verbose:true}", "hydra.searchpath=[]",
    "seed=1,2", "seed=range(3)", "seed=choice(1)", "seed=int('3')", "seed=shuffle([1])", "seed=", "seed", "=",
    "seed=[", "checkpoint.keep=2", "tensorboard.images=false", "tensorboard={images:false}", "ddp={}", "defaults=1",
    "+defaults=[model: mlp]", "package.x=1", "_target_=x",
)  # fmt: skip


OWN = {
    "recipe/a.yaml": "# @package _global_\nepochs: 3\n",
    "aug/a.yaml": "flip: 1\n",
    "aug/b.yaml": "flip: 2\n",
    "model/own.yaml": "defaults: [/aug@opts: a, _self_]\n_target_: mine.Net\n",
}


def outcome(compose: Any) -> Any:
    """All of a configuration, or what is said instead of it."""
    try:
        composed = compose()
    except Exception as error:
        return type(error), str(error)
    return list(parts(composed)), OmegaConf.get_cache(composed)


def parts(node: Any, key: str = "") -> Iterator[object]:
    """Every node with its kind, its flags and what it may hold."""
    assert isinstance(node, Node)
    metadata = {
        name: value for name, value in vars(node._metadata).items() if name != "resolver_cache"
    }
    held = (
        node._value()
        if not isinstance(node, Container) or node._is_none() or node._is_missing()
        else None
    )
    yield key, type(node), metadata, repr(held)
    if isinstance(node, DictConfig | ListConfig) and isinstance(node._content, dict | list):
        keys: list[Any] = (
            list(node._content) if isinstance(node, DictConfig) else list(range(len(node)))
        )
        for below in keys:
            found = node._get_node(below)
            assert isinstance(found, Node)
            assert found._get_parent() is node
            yield from parts(found, f"{key}.{below!r}")


MASTERS = (
    (),
    ("batch_size=32", "hydra.job.env_copy=[HOME]", "hydra.job.config.override_dirname.kv_sep=:"),
)


@functools.cache  # with what it has composed: Hydra takes 0.1 s for a point
def of_a_command(loader: ConfigLoader, *words: str) -> tuple[DictConfig, PointComposer]:
    context, master = context_and_master(loader, *words)
    return master, PointComposer(context, master)


def same_as_hydras(
    loader: ConfigLoader, words: list[str], master_words: tuple[str, ...] = ()
) -> None:
    master, composer = of_a_command(loader, *master_words)
    with hydra_words.parsed_once():
        for _ in range(2):  # what was made of the first copy leaves the second alone
            ours = outcome(lambda: composer.compose(master, words))
        quick = composer.settings(master, words)
    assert ours == outcome(lambda: loader.load_sweep_config(master, words))
    if quick is not None:
        whole = plain(composer.compose(master, words), sweep=True)
        assert fill_auto_of_a_sweep(quick) == whole
        assert repr(fill_auto_of_a_sweep(quick)) == repr(whole), (
            "1 is not true, and the order stays"
        )


SOME = WORDS[::5]
"""Of each five kinds one: Hydra takes 0.3 s for a word."""


@pytest.mark.parametrize(
    "word",
    [*SOME, *(pytest.param(word, marks=pytest.mark.slow) for word in WORDS if word not in SOME)],
)
def test_a_word_of_any_kind_makes_what_hydra_makes_of_it(loader: ConfigLoader, word: str) -> None:
    same_as_hydras(loader, [word, "seed=5"])


@settings(
    max_examples=5,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.lists(st.sampled_from(WORDS), max_size=5), st.sampled_from(MASTERS))
def test_any_words_make_what_hydra_makes_of_them(
    loader: ConfigLoader, words: list[str], master_words: tuple[str, ...]
) -> None:
    same_as_hydras(loader, words, master_words)


@pytest.mark.parametrize(
    "words", [["+recipe=a", "seed=4"], ["model=own", "aug@model.opts=b", "model.opts.flip=5"]]
)
def test_of_groups_of_ones_own_a_point_is_what_hydra_composes(
    loader: ConfigLoader, tmp_path: Path, words: list[str]
) -> None:
    for name, text in OWN.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    same_as_hydras(loader, words, (f"hydra.searchpath=[file://{tmp_path}]",))


PIECES = [f"{group}={path.stem}" for group in ALONE for path in options(group)]


@pytest.mark.parametrize(
    "word", [*PIECES[:2], *(pytest.param(word, marks=pytest.mark.slow) for word in PIECES[2:])]
)
def test_what_tests_piece_together_is_what_hydra_composes(loader: ConfigLoader, word: str) -> None:
    def settings(*words: str) -> Any:
        found: Any = OmegaConf.to_container(
            loader.load_configuration("config", [*words], RunMode.RUN)
        )
        return {key: found[key] for key in found if key != "hydra"}

    group, _, name = word.partition("=")
    expected = settings(word)
    assert expected == {**settings(), group: _piece(group, name)}
    assert repr(expected[group]) == repr(_piece(group, name)), "1 is not true, and the order stays"


def test_hydra_composes_once_for_all_values(
    loader: ConfigLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, master = context_and_master(loader)
    composer, real, asked = (
        PointComposer(context, master),
        ConfigLoaderImpl.load_sweep_config,
        list[list[str]](),
    )

    def load(self: ConfigLoaderImpl, master: DictConfig, words: list[str]) -> DictConfig:
        asked.append(words)
        return real(self, master, words)

    monkeypatch.setattr(ConfigLoaderImpl, "load_sweep_config", load)
    for model in ("mlp", "convnet"):
        for seed in range(3):
            point = [f"model={model}", f"seed={seed}", f"optimizer.lr=0.{seed + 1}"]
            quick = composer.settings(master, point)
            assert quick is not None
            assert (quick["seed"], quick["model"]["name"]) == (seed, model)
            assert composer.compose(master, point).hydra.overrides.task == point
    assert asked == [["model=mlp"], ["model=convnet"]]


def test_a_point_is_composed_anew_where_hydra_sets_values_in_another_way(
    loader: ConfigLoader, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hydra_words.changed.cache_clear()
    master, composer = of_a_command(loader)
    with monkeypatch.context() as patch:
        patch.delattr(ConfigLoaderImpl, "_apply_overrides_to_config")
        assert not hydra_adapter.set_values(OmegaConf.create(), [], [])
    assert "this version of Hydra sets values in another way" in capsys.readouterr().err
    monkeypatch.setattr(point_composer, "set_values", lambda *_: False)
    assert outcome(lambda: composer.compose(master, ["seed=4"])) == outcome(
        lambda: loader.load_sweep_config(master, ["seed=4"])
    )
