"""The tricks on Hydra: what they do, that they can be seen through by nobody, and that a run goes
on without them.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.callbacks import Callbacks
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from hydra.plugins.plugin import Plugin
from hydra.plugins.sweeper import Sweeper
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

import expt
from expt.command import hydra_adapter, hydra_composing, hydra_words
from expt.command.hydra_adapter import fail, prefer_own_launchers
from expt.errors import ConfigError, RunFailed
from tests.conftest import environment


@pytest.fixture(autouse=True)
def _says_it_again() -> None:
    hydra_words.changed.cache_clear()


def composed_by(*words: str) -> list[RunMode]:
    """The modes for which Hydra composed the command's configuration, which is refused at its end."""
    found = []
    real = ConfigLoaderImpl.load_configuration

    def load(
        self: ConfigLoaderImpl,
        config_name: str,
        overrides: list[str],
        run_mode: RunMode,
        **more: bool,
    ) -> Any:
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
    assert composed_by(folder, "optimizer.lr=0.1,0.2") == [
        RunMode.MULTIRUN,
        RunMode.RUN,
    ], "Hydra's own way"
    assert composed_by(folder, "nosuch=1") == [RunMode.RUN] * 2


def test_what_is_composed_once_is_what_hydra_composes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def settings(name: str) -> str:
        run = expt.run(
            "max_steps=1", "tensorboard.images=false", f"hydra.run.dir='{tmp_path / 'run'}'"
        )
        return (run.folder.rename(tmp_path / name) / ".hydra/hydra.yaml").read_text()

    once = settings("once")
    monkeypatch.setattr(hydra_composing, "_composed_once", contextlib.nullcontext)
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


@pytest.mark.slow
def test_that_holds_in_a_command_whose_plugins_hydra_has_yet_to_import(tmp_path: Path) -> None:
    counting = """
import collections, sys
from omegaconf import OmegaConf
read, real = collections.Counter(), OmegaConf.load
OmegaConf.load = staticmethod(lambda file: read.update([file.name]) or real(file))
sys.argv = ["expt", "-m", *sys.argv[1:]]
from expt.__main__ import main
try:
    main()
finally:
    from expt.command.conf_files import conf_dir
    print(max(number for name, number in read.items() if name.startswith(str(conf_dir()))), len(read))
"""
    done = subprocess.run(
        [sys.executable, "-c", counting, *DRY],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
    )
    most, files = map(int, done.stdout.splitlines()[-1].split())
    assert (most, files > 8) == (1, True), done.stderr


@pytest.mark.parametrize("gone", ["its way of checking", "its way of keeping results"])
def test_a_sweep_goes_on_where_hydra_has_changed(
    gone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if gone == "its way of checking":
        monkeypatch.delattr(Sweeper, "validate_batch_is_legal")
        monkeypatch.setattr(
            Plugin, "validate_batch_is_legal", lambda *_: None, raising=False
        )  # elsewhere
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


class Whole:
    """What can be copied, and not pickled."""

    def __init__(self) -> None:
        self.own = lambda: None


def test_a_configuration_is_copied_as_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Whole()
    content = {"a": {"b": "${c}", "d": [1, {"e": 2.5}], "f": "???"}, "c": None, "g": Path("x")}
    plain = OmegaConf.create(content, flags={"struct": True, "readonly": True})
    own = OmegaConf.create({**content, "own": kept}, flags={"allow_objects": True})
    pickled, real = list[Any](), pickle.dumps

    def dumps(config: object, protocol: int) -> bytes:
        pickled.append(config)
        return real(config, protocol)

    monkeypatch.setattr(pickle, "dumps", dumps)
    for whole in plain, own, plain.a:
        expected = copy.deepcopy(whole)
        assert not pickled
        with hydra_adapter.copied_sooner():
            copied = copy.deepcopy(whole)
        assert pickled.pop() is whole
        assert (copied._content is whole._content, copied == expected) == (False, True)
        assert [copied._get_parent() is config._get_parent() for config in (expected, whole)] == [
            True,
            True,
        ]
        assert [OmegaConf.is_struct(config) for config in (copied, whole)] == [
            OmegaConf.is_struct(expected)
        ] * 2
        assert [OmegaConf.is_readonly(config) for config in (copied, whole)] == [
            OmegaConf.is_readonly(expected)
        ] * 2
        assert str(copied) == str(expected)
    assert copied.d[1]._get_parent() is copied.d
    assert isinstance(own.own, Whole)


def test_a_failed_run_is_nan_to_a_sweeper_and_its_error_to_callbacks() -> None:
    error = RunFailed("rank 0 raised")
    failed = fail(JobReturn(overrides=["seed=1"], task_name="x"), error)
    assert math.isnan(failed.return_value)
    assert (failed._return_value, failed.status, failed.overrides) == (
        error,
        JobStatus.FAILED,
        ["seed=1"],
    )
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


def test_hydras_own_line_about_a_failure_is_left_out(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="epochs=0"):
        expt.run("epochs=0", f"hydra.run.dir='{tmp_path / 'run'}'")
    assert capfd.readouterr().err == ""


def test_a_callback_that_raises_is_told_in_a_line_each_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
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
    assert (
        capsys.readouterr().err
        == 2 * "warning: Callback Bad.on_run_start raised ValueError: no licence\n"
    )


@pytest.mark.parametrize(
    ("typed", "completed"), [("pred", "predict"), ("predict mod", ""), ("m", "model=")]
)
def test_words_are_completed_and_what_follows_one_is_left_to_the_shell(
    typed: str, completed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COMP_LINE", f"expt {typed}")
    hydra_adapter.call(lambda _: None, ["-sc", "query=bash"])
    words = capsys.readouterr().out.split()
    assert completed in words if completed else not words
