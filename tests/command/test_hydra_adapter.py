"""The tricks on Hydra: what they do, that they can be seen through by nobody, and that a run goes on without them."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra import initialize_config_dir
from hydra._internal.callbacks import Callbacks
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.plugins.plugin import Plugin
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError

import expt
from expt.command import hydra_adapter
from expt.command.conf_files import conf_dir
from expt.command.hydra_adapter import PointComposer, fail, prefer_own_launchers
from expt.command.overrides import register_resolvers
from expt.errors import ConfigError, RunFailed


@pytest.fixture(autouse=True)
def _says_it_again() -> None:
    hydra_adapter._changed.cache_clear()


@pytest.fixture
def loader() -> Iterator[ConfigLoader]:
    register_resolvers()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        yield GlobalHydra.instance().config_loader()


def context_and_master(loader: ConfigLoader, *words: str) -> tuple[HydraContext, DictConfig]:
    """What a launcher is given for a sweep."""
    master = loader.load_configuration("config", [f"hydra.sweep.dir={os.devnull}", *words], RunMode.MULTIRUN)
    return HydraContext(config_loader=loader, callbacks=Callbacks()), master


def test_a_sweeper_checks_what_is_new_alone_and_the_launcher_composes_all(loader: ConfigLoader) -> None:
    context, master = context_and_master(loader)
    composer = PointComposer(context, master)
    checked = context.config_loader.load_sweep_config(master, ["seed=0", "model=mlp"])
    assert (checked.seed, checked.model.name) == (0, "mlp")
    seen = context.config_loader.load_sweep_config(master, ["seed=1", "model=mlp"])
    with pytest.raises(ConfigAttributeError):
        _ = seen.seed
    for mistake in (["seed=2", "model=mpl"], ["seeed=2", "model=mlp"], ["seed=[", "model=convnet"]):
        with pytest.raises(HydraException):
            context.config_loader.load_sweep_config(master, mistake)
    assert composer.compose(master, ["seed=0", "model=mlp"]) is checked
    assert composer.compose(master, ["seed=1", "model=mlp"]).seed == 1
    assert composer.compose(master, ["seed=0", "model=mlp"]) is not checked, "a point named twice is another object"


def test_the_second_loader_knows_all_that_hydras_does(loader: ConfigLoader) -> None:
    context, master = context_and_master(loader)
    PointComposer(context, master)
    assert context.config_loader is not loader
    assert context.config_loader.get_group_options("model") == loader.get_group_options("model")
    assert loader.load_sweep_config.__self__ is loader  # type: ignore[attr-defined]  # and it is as it was


def test_a_sweeper_that_may_look_at_what_is_composed_is_given_hydras_own(loader: ConfigLoader) -> None:
    context, master = context_and_master(loader)
    master.hydra.runtime.choices["hydra/sweeper"] = "optuna"
    composer = PointComposer(context, master)
    assert context.config_loader is loader
    assert composer.compose(master, ["seed=3"]).seed == 3


def composed_by(*words: str) -> list[RunMode]:
    """The modes for which Hydra composed the command's configuration, which is refused at its end."""
    found = []
    real = ConfigLoaderImpl.load_configuration

    def load(self: ConfigLoaderImpl, config_name: str, overrides: list[str], run_mode: RunMode, **more: bool) -> Any:
        found.append(run_mode)
        return real(self, config_name, overrides, run_mode, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ConfigLoaderImpl, "load_configuration", load)
        with pytest.raises(ConfigError):
            expt.run("epochs=0", *words)
    return found


def test_a_run_is_composed_once(tmp_path: Path) -> None:
    folder = f"hydra.run.dir='{tmp_path / 'run'}'"
    assert composed_by(folder) == [RunMode.RUN]
    assert composed_by(folder, "hydra.mode=RUN") == [RunMode.RUN]
    assert composed_by(folder, "optimizer.lr=0.1,0.2") == [RunMode.MULTIRUN, RunMode.RUN], "Hydra's own way"
    assert composed_by(folder, "nosuch=1") == [RunMode.RUN] * 2


def test_what_is_composed_once_is_what_hydra_composes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def settings(name: str) -> str:
        run = expt.run("max_steps=1", "tensorboard.images=false", f"hydra.run.dir='{tmp_path / 'run'}'")
        return (run.folder.rename(tmp_path / name) / ".hydra/hydra.yaml").read_text()

    once = settings("once")
    monkeypatch.setattr(hydra_adapter, "_composed_once", contextlib.nullcontext)
    assert once == settings("twice")
    assert "hydra.mode=RUN" in once


def test_a_run_goes_on_where_hydra_has_another_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Hydra, "choose", Hydra.get_mode, raising=False)
    monkeypatch.delattr(Hydra, "get_mode")
    with pytest.raises(AttributeError, match="get_mode"):  # what this Hydra itself says then
        expt.run("epochs=0", f"hydra.run.dir='{tmp_path / 'run'}'")
    assert "reads hydra.mode in another way" in capsys.readouterr().err


def test_a_file_is_read_once_in_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    mine = tmp_path / "model/mine.yaml"
    mine.write_text("defaults: [mlp]\nhidden: [7]\n")
    real = ConfigLoaderImpl.load_sweep_config

    def load(self: ConfigLoaderImpl, master: DictConfig, point: list[str]) -> DictConfig:
        composed = real(self, master, point)
        mine.write_text("defaults: [mlp]\nhidden: [8]\n")
        return composed

    monkeypatch.setattr(ConfigLoaderImpl, "load_sweep_config", load)
    own = ("--config-dir", str(tmp_path), "model=mine", f"hydra.sweep.dir='{tmp_path / 'sweep'}'")
    runs = expt.sweep("seed=0,1,2", "max_steps=1", "world_size=1", "tensorboard.images=false", *own)
    assert [run.record["config"]["model"]["hidden"] for run in runs] == [[7], [7], [7]]


DRY = ("seed=0,1", "hydra.launcher.dry_run=true")


@pytest.mark.parametrize("gone", ["its way of checking", "its way of keeping results"])
def test_a_sweep_goes_on_where_hydra_has_changed(
    gone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if gone == "its way of checking":
        monkeypatch.delattr(Sweeper, "validate_batch_is_legal")
        monkeypatch.setattr(Plugin, "validate_batch_is_legal", lambda *_: None, raising=False)  # elsewhere
    else:
        monkeypatch.delattr(JobReturn, "return_value")
    assert expt.sweep(*DRY, f"hydra.sweep.dir='{tmp_path / 'sweep'}'") == []
    out, err = capsys.readouterr()
    assert [line.split()[1] for line in out.splitlines()[1:]] == ["seed=0", "seed=1"]
    assert err.startswith("warning: this version of Hydra ")
    assert err.count("\n") == 1


def test_a_launcher_of_ones_own_name_is_asked_for_to_be_removed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launchers = ConfigStore.instance().repo["hydra"]["launcher"]
    monkeypatch.setitem(launchers, "submitit_local.yaml", "another's")
    prefer_own_launchers(["hydra/launcher=pool"])
    assert "submitit_local.yaml" in launchers
    prefer_own_launchers(["hydra/launcher=submitit_local"])
    assert "submitit_local.yaml" not in launchers
    monkeypatch.setattr(ConfigStore.instance(), "repo", None)
    prefer_own_launchers(["hydra/launcher=submitit_local"])
    assert "uninstall it" in capsys.readouterr().err


def test_a_failed_run_is_nan_to_a_sweeper_and_its_error_to_callbacks() -> None:
    error = RunFailed("rank 0 raised")
    failed = fail(JobReturn(overrides=["seed=1"], task_name="x"), error)
    assert math.isnan(failed.return_value)
    assert (failed._return_value, failed.status, failed.overrides) == (error, JobStatus.FAILED, ["seed=1"])
    assert pickle.loads(pickle.dumps(failed)).task_name == "x"


@pytest.mark.parametrize("before", [None, "0"])
def test_what_hydra_reads_is_put_back(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["me", "mine"])
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    if before:
        monkeypatch.setenv("HYDRA_FULL_ERROR", before)
    with pytest.raises(ConfigError, match="bakend"):
        expt.run("bakend=gloo")
    assert (sys.argv, os.environ.get("HYDRA_FULL_ERROR")) == (["me", "mine"], before)


def test_hydras_own_line_about_a_failure_is_left_out(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="epochs=0"):
        expt.run("epochs=0", f"hydra.run.dir='{tmp_path / 'run'}'")
    assert capfd.readouterr().err == ""


def test_a_callback_that_raises_is_told_in_a_line_each_time(capsys: pytest.CaptureFixture[str]) -> None:
    class Bad(Callback):
        def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
            raise ValueError("no licence")

    callbacks = Callbacks()
    callbacks.callbacks.append(Bad())

    def warned() -> None:
        with hydra_adapter._warnings_in_a_line():
            for _ in range(2):
                callbacks.on_run_start(DictConfig({}))
            warnings.warn("of another's", stacklevel=1)

    with pytest.warns(UserWarning, match="of another's"):
        warned()
    assert capsys.readouterr().err == 2 * "warning: Callback Bad.on_run_start raised ValueError: no licence\n"
