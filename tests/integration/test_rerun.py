"""A run is repeated from its record exactly; secrets of the environment are not written."""

import json
import os
import stat
import subprocess
from pathlib import Path

import pytest

import expt
from expt.errors import ConfigError
from tests.conftest import Trained
from tests.facade import Patch, RunFolder, as_typed, run
from tests.integration.test_resume import assert_equal

SETTINGS = as_typed("model.dropout=0.2 epochs=2 log_every=2 threads=1 dataset.train_limit=320")
SECRET = "xyzzy-7f3a-plugh"


def test_a_run_is_repeated_to_the_same_bits(tmp_path: Path, trained: Trained) -> None:
    first = trained(*SETTINGS, "dataset.augment.crop_padding=1", "world_size=2")
    again = expt.rerun(first.folder, tmp_path / "again")
    assert_equal(RunFolder(again.folder), first)
    assert again.record["rerun_of"] == str(first.folder)
    expected = (first.result["identity"], first.result["config"])
    assert (again.record["identity"], again.record["config"]) == expected
    gone_on = trained("resume=auto", "epochs=3", name="again")
    assert gone_on.result["resumed_from"]["step"] == 10
    with pytest.raises(ConfigError, match="holds a run already"):
        expt.rerun(first.folder, tmp_path / "again")
    with pytest.raises(ConfigError, match="holds 2 runs; name one"):
        expt.rerun(tmp_path)


def test_a_run_of_a_sweep_is_repeated_by_a_command_that_says_what_changed(tmp_path: Path) -> None:
    _, second = expt.sweep(
        "seed=3,4", *SETTINGS, "world_size=1", f"hydra.sweep.dir={tmp_path / 'sweep'}"
    )
    record = second.folder / "result.json"
    other = json.loads(record.read_text())
    other["versions"]["torch"], other["git"] = "2.9.9", {"commit": "0123456789abcdef", "diff": ""}
    record.write_text(json.dumps(other))
    done = run("rerun", str(second.folder), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "warning: versions: torch 2.9.9 then, " in done.stderr
    assert "warning: git commit: 0123456789ab then, none now" in done.stderr
    assert "the same numbers in all 10 metrics" in done.stdout
    (again,) = (tmp_path / "outputs").glob("*/*")
    assert RunFolder(again).points == RunFolder(second.folder).points
    assert RunFolder(again).result["seed"] == 4


@pytest.mark.slow
def test_own_source_that_git_lacks_is_named(tmp_path: Path) -> None:
    """Also a module that no import statement names, which only its worker knows."""
    (tmp_path / "tracked.py").write_text(
        "import importlib, torch\n"
        "dampened = importlib.import_module('by_its_name').DAMPENED\n"
        "class Mine(torch.optim.SGD): pass\n"
    )
    (tmp_path / "by_its_name.py").write_text("DAMPENED = 0\n")
    (tmp_path / ".gitignore").write_text("by_its_name.py\none\ntwo\n")
    for line in ("init -q", "add .", "-c user.name=a -c user.email=a@b commit -qm a"):
        subprocess.run(["git", *line.split()], cwd=tmp_path, check=True)
    own = "optimizer={_target_: tracked.Mine, lr: 0.1}"
    short = as_typed("epochs=1 dataset.train_limit=64 world_size=1 tensorboard.images=false")
    for words in ((own, *short, "hydra.run.dir=one"), ("rerun", "one", "two")):
        done = run(*words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        lines = [line for line in done.stderr.splitlines() if "git does not track" in line]
        assert [line.count("track by_its_name.py or") for line in lines] == [1]


def test_the_record_and_the_checkpoint_say_where_the_numbers_come_from(trained: Trained) -> None:

    run = trained("max_steps=2", "world_size=1", "seed=5")
    saved = run.state()
    result = run.result
    assert saved["config"]["seed"] == result["seed"] == 5
    for key in ("command", "versions", "hardware", "seed"):
        assert saved["provenance"][key] == result[key]
    assert saved["provenance"]["git"] == {"commit": result["git"]["commit"]}, "no changes"
    assert {"cpu", "cores", "memory_gib", "gpus"} == result["hardware"].keys()
    assert result["hardware"]["memory_gib"] > 0.5


@pytest.fixture
def secretive(tmp_path: Path) -> tuple[str, ...]:
    """The words for a model that is given a secret, and tells it in an exception when asked to."""
    (tmp_path / "secretive.py").write_text(
        "import os, torch\n"
        "class Net(torch.nn.Sequential):\n"
        "    def __init__(self, *, channels, image_size, num_classes, url, tell):\n"
        "        super().__init__(torch.nn.Flatten(), torch.nn.Linear(64, num_classes))\n"
        f"        assert url == 'https://me:{SECRET}@host', 'it is resolved'\n"
        "        self.told = url if tell else None\n"
        "    def forward(self, images):\n"
        "        if self.told: raise RuntimeError('refused: ' + self.told)\n"
        "        return super().forward(images)\n"
    )
    own = as_typed(
        "+model._target_=secretive.Net ~model.hidden ~model.dropout epochs=1 world_size=1"
    )
    return (*own, "+model.url='https://me:${oc.env:EXPT_TEST_TOKEN}@host'", "+model.tell=false")


def test_environment_secrets_are_not_written(secretive: tuple[str, ...], tmp_path: Path) -> None:
    for name, tell in (("quiet", "false"), ("loud", "true")):
        words = [*secretive[:-1], f"+model.tell={tell}", f"hydra.run.dir={name}"]
        done = run(*words, cwd=tmp_path, EXPT_TEST_TOKEN=SECRET)
        assert done.returncode == (1 if tell == "true" else 0), done.stderr
        files = [path for path in (tmp_path / name).rglob("*") if path.is_file()]
        assert len(files) > 5
        assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    result = RunFolder(tmp_path / "quiet").result
    assert result["config"]["model"]["kwargs"]["url"] == "https://me:${oc.env:EXPT_TEST_TOKEN}@host"
    assert (
        "refused: https://me:${oc.env:EXPT_TEST_TOKEN}@host"
        in RunFolder(tmp_path / "loud").result["error"]
    )


def test_a_rerun_takes_it_from_the_environment_again(
    secretive: tuple[str, ...], tmp_path: Path, trained: Trained, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("EXPT_TEST_TOKEN", SECRET)
    first = trained(*secretive, "debug=true")
    expt.rerun(first.folder, tmp_path / "again")
    assert RunFolder(tmp_path / "again").points == first.points
    monkeypatch.delenv("EXPT_TEST_TOKEN")
    with pytest.raises(ConfigError, match=r"EXPT_TEST_TOKEN.*cannot be resolved"):
        expt.rerun(first.folder, tmp_path / "never")


@pytest.mark.parametrize(
    ("umask", "mode"),
    [(0, 0o664), pytest.param(0o027, 0o640, marks=pytest.mark.slow)],  # as lax as can be
)
def test_nobody_else_can_write_what_a_run_leaves(umask: int, mode: int, trained: Trained) -> None:
    before = os.umask(umask)
    try:
        folder = trained("max_steps=2", "world_size=1").folder
    finally:
        os.umask(before)
    assert not [path for path in folder.rglob("*") if path.stat().st_mode & stat.S_IWOTH]
    for name in ("result.json", "metrics.jsonl"):
        assert stat.S_IMODE((folder / name).stat().st_mode) == mode
