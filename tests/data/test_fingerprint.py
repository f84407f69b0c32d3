"""Data is known by what its files hold: the same elsewhere, another when overwritten."""

import dataclasses
import gzip
import json
import os
import py_compile
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import expt
from expt.config.identity import Identity, shown
from expt.data import checksums, fingerprint
from expt.errors import ConfigError, DataError, RunFailed
from expt.runs import checkpoint
from expt.runs.paths import RunPaths, write_atomically
from expt.runs.result import create_result, read_result, update_result
from tests.conftest import Configured
from tests.data.test_files import config, write_idx_set
from tests.facade import Capture, Patch, as_typed, dataset, request_of, run, start
from tests.faults.running import wait_until


def folder(root: Path) -> Any:
    return dataset("dataset=image_folder dataset.root=x", root=str(root), image_size=(8, 8))


def images(root: Path, seed: int = 0) -> Path:
    """Two classes of four images, in train/ and test/."""
    chance = np.random.default_rng(seed)
    for split in ("train", "test"):
        for name in ("cat", "dog"):
            (root / split / name).mkdir(parents=True, exist_ok=True)
            for number in range(40):
                pixels = chance.integers(0, 256, (8, 8, 3), np.uint8)
                Image.fromarray(pixels).save(
                    root / split / name / f"{number}.png", compress_level=0
                )
    return root


def test_originals_are_known_by_their_name(fashion_mnist: str, mnist: str) -> None:
    assert config("fashion_mnist", fashion_mnist).fingerprint() is None
    assert config("mnist", mnist).fingerprint() is None


def test_one_known_set_is_not_taken_for_another(mnist: str) -> None:
    with pytest.raises(DataError, match=r"those of mnist; use dataset=mnist"):
        config("fashion_mnist", mnist).fingerprint()


def test_other_files_are_known_by_their_content(tmp_path: Path, capsys: Capture) -> None:
    write_idx_set(tmp_path / "one")
    write_idx_set(tmp_path / "two", sizes=(31, 20))
    shutil.copytree(tmp_path / "one", tmp_path / "packed")
    for path in (tmp_path / "packed").iterdir():
        with gzip.open(f"{path}.gz", "wb") as file:
            file.write(path.read_bytes())
        path.unlink()
    found = {
        name: config("mnist", tmp_path / name).fingerprint() for name in ("one", "two", "packed")
    }
    assert found["one"] == found["packed"] != found["two"]
    assert None not in found.values()
    assert f"the files in {tmp_path / 'one'} are not the published ones" in capsys.readouterr().err


def test_a_folder_is_the_same_on_another_machine(tmp_path: Path) -> None:
    one = images(tmp_path / "one")
    shutil.copytree(one, tmp_path / "copy")
    for path in (tmp_path / "copy").rglob("*.png"):
        os.utime(path, (1, 1))
    assert folder(one).fingerprint() == folder(tmp_path / "copy").fingerprint()


@pytest.mark.parametrize(
    "change", ["overwritten", "renamed", "added", "removed", "in test", "in val"]
)
def test_a_folder_that_changes_is_another(tmp_path: Path, change: str) -> None:
    root = images(tmp_path / "one")
    before = folder(root).fingerprint()
    image = root / ("test" if change == "in test" else "train") / "cat/3.png"
    if change == "renamed":
        image.rename(image.with_name("x.png"))
    elif change == "added":
        shutil.copy(image, image.with_name("x.png"))
    elif change == "removed":
        image.unlink()
    elif change == "in val":
        for name in ("cat", "dog"):
            (root / "val" / name).mkdir(parents=True)
            shutil.copy(image, root / "val" / name / "x.png")
    else:  # as many bytes
        shutil.copy(image.with_name("4.png"), image)
    assert folder(root).fingerprint() != before


def test_a_large_folder_is_sampled(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(checksums, "SAMPLED", 5)
    root = images(tmp_path / "one")
    shutil.copytree(root, tmp_path / "copy")
    assert folder(root).fingerprint() == folder(tmp_path / "copy").fingerprint()
    for path in (root / "train/cat").iterdir():
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    for path in (root / "train/dog").iterdir():
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert folder(root).fingerprint() != folder(tmp_path / "copy").fingerprint()


def test_a_file_is_read_once(tmp_path: Path, monkeypatch: Patch) -> None:
    root = images(tmp_path / "one")
    first = folder(root).fingerprint()
    (remembered,) = (tmp_path / "cache").rglob("*.json")
    text = remembered.read_text()
    for content in (
        text.replace('"', "'"),
        "[]",
        "{}",
        json.dumps(dict.fromkeys(json.loads(text), 5)),
    ):
        remembered.write_text(content)
        assert folder(root).fingerprint() == first
    monkeypatch.setattr(checksums, "md5", None)  # nothing is read
    assert folder(root).fingerprint() == first
    monkeypatch.undo()
    image = root / "train/cat/3.png"
    stat = image.stat()
    image.write_bytes(bytes(stat.st_size))
    os.utime(image, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as copies that keep times do
    monkeypatch.setenv("EXPT_CACHE", str(tmp_path / "cache"))
    assert folder(root).fingerprint() != first


NET = """
import torch
class Net(torch.nn.Sequential):
    def __init__(self, *, channels, image_size, num_classes):
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(64, num_classes))
"""


def test_source_edited_in_mid_sweep_is_not_taken_for_that_of_before(tmp_path: Path) -> None:
    (tmp_path / "own_net.py").write_text(
        NET + f"from pathlib import Path\nPath({str(tmp_path)!r}, 'began').touch()\n"
    )
    (tmp_path / "conf/model").mkdir(parents=True)
    (tmp_path / "conf/model/own.yaml").write_text("_target_: own_net.Net\n")
    words = (
        *as_typed("-m --config-dir conf"),
        *as_typed("model=own seed=0,1 epochs=1 world_size=1 hydra.sweep.dir=sweep"),
    )
    process = start(
        *words, "hydra.launcher.max_concurrent=1", cwd=tmp_path, PYTHONPATH=str(tmp_path)
    )
    wait_until((tmp_path / "began").exists, process)
    (tmp_path / "own_net.py").write_text(NET)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1, out
    assert "own source changed after the command was typed; type it again" in out
    assert err == "error: 1 of 2 runs failed\n"
    done = run(*words, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert len(list((tmp_path / "sweep").glob("*/metrics.jsonl"))) == 3


PLUGINS = """
import importlib, pkgutil
import torch
import plugins
from base import WIDTH
class Net(torch.nn.Sequential):
    def __init__(self, *, channels, image_size, num_classes):
        found = (importlib.import_module(each.name) for each in
            pkgutil.iter_modules(plugins.__path__, "plugins."))
        width = WIDTH + sum(each.WIDTH for each in found)
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(64, width),
            torch.nn.Linear(width, num_classes))
"""


def test_plugins_that_only_a_search_finds_are_part_of_what_a_run_is(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """A new one, and an edit that leaves size and time of the file as they were.

    As of a module that is imported, which plain Python has cached.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "searching.py").write_text(PLUGINS)
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins/__init__.py").touch()

    def write(name: str, width: int) -> str:
        (tmp_path / name).write_text(f"WIDTH = {width}\n")
        os.utime(tmp_path / name, (1, 1))
        return name

    py_compile.compile(write("base.py", 8))
    write("base.py", 0)

    def widths(name: str, width: int) -> list[int]:
        """The widths of the models of all runs in the sweep's folder, once this plugin is there."""
        write(f"plugins/{name}", width)
        few = as_typed("max_steps=1 world_size=1 tensorboard.images=false hydra.sweep.dir=sweep")
        runs = expt.sweep("+model._target_=searching.Net", *few, "~model.hidden", "~model.dropout")
        found = [RunPaths(path.parent).last for path in (tmp_path / "sweep").glob("*/result.json")]
        assert len(runs) == 1
        return sorted(len(checkpoint.load(path)["model"]["1.bias"]) for path in found)

    assert widths("one.py", 3) == [3]
    assert widths("one.py", 3) == [3]
    assert widths("one.py", 4) == [3, 4]
    assert widths("two.py", 1) == [3, 4, 5]


def test_what_runs_have_come_to_outlives_the_absence_of_their_data(tmp_path: Path) -> None:
    """One that was stopped stays as it is, and one that has completed counts."""
    table = tmp_path / "t.csv"
    table.write_text("a,b,y\n" + "".join(f"{row % 7},{row % 5},{row}\n" for row in range(40)))
    data = as_typed(f"task=regression dataset=table dataset.path={table} dataset.targets=y")
    few = as_typed("max_steps=1 world_size=1 batch_size=8 seed=0,1")
    words = (*data, *few, f"hydra.sweep.dir={tmp_path / 'sweep'}")
    stopped, done = (RunPaths(result.folder) for result in expt.sweep(*words))
    write_atomically(stopped.result, json.dumps({**read_result(stopped), "status": "interrupted"}))
    kept = [paths.metrics.read_bytes() for paths in (stopped, done)]
    table.rename(tmp_path / "away.csv")
    assert [result.folder for result in expt.sweep(*words).completed] == [done.folder]
    assert [paths.metrics.read_bytes() for paths in (stopped, done)] == kept
    assert read_result(stopped)["status"] == "interrupted"


def test_links_that_lead_nowhere_and_damaged_pictures_are_named_together(
    configured: Configured, tmp_path: Path
) -> None:
    root = images(tmp_path / "one")
    for name in ("u.png", "v.png"):
        (root / "train/cat" / name).symlink_to("nothing")
    (root / "train/cat/w.png").write_text("no picture")
    with pytest.raises(DataError) as caught:
        fingerprint.content_of(configured("dataset=image_folder", f"dataset.root={root}"))
    assert [line.split()[0][-5:] for line in caught.value.problems] == ["u.png", "v.png", "w.png"]


@pytest.mark.parametrize("change", ["gone", "other"])
def test_files_that_go_before_a_runs_turn_are_said_to_be_missing(
    configured: Configured, tmp_path: Path, change: str
) -> None:
    write_idx_set(tmp_path)
    config = configured("dataset=mnist", f"dataset.root={tmp_path}", "dataset.download=false")
    asked = request_of(config, tmp_path / "run", fingerprint.content_of(config))
    fingerprint.refuse_changed(asked)
    if change == "gone":
        (tmp_path / "train-labels-idx1-ubyte").unlink()
        with pytest.raises(DataError, match=r"train-labels-idx1-ubyte .* not found"):
            fingerprint.refuse_changed(asked)
    else:
        write_idx_set(tmp_path, sizes=(40, 20))
        with pytest.raises(RunFailed, match="files changed after the command was typed"):
            fingerprint.refuse_changed(asked)


def test_first_weights_are_known_by_what_they_hold(tmp_path: Path, configured: Configured) -> None:
    file = tmp_path / "file.pt"
    file.write_bytes(b"one")
    config = configured(f"weights={file}")
    known = fingerprint.identity_of(config)
    asked = request_of(config, tmp_path / "run", known.content)
    fingerprint.refuse_changed(asked)
    file.write_bytes(b"another")
    with pytest.raises(RunFailed, match="the first weights changed after the command was typed"):
        fingerprint.refuse_changed(asked)
    assert (now := fingerprint.identity_of(config)) != known
    moved = file.rename(tmp_path / "moved.pt")
    elsewhere = fingerprint.identity_of(configured(f"weights={moved}"))
    assert elsewhere == now, "wherever they lie"
    with pytest.raises(ConfigError, match="there is no such file or folder"):
        fingerprint.identity_of(config)
    again = dataclasses.replace(config, resume="auto")
    assert "weights" not in fingerprint.content_of(again)
    create_result(asked.paths, content=known.content)
    asked.paths.checkpoints.mkdir()
    asked.paths.last.touch()
    assert fingerprint.identity_of(again, asked.paths) == known, "those that it began with"


def test_what_goes_on_from_itself_is_the_run_that_it_would_have_been(
    tmp_path: Path, configured: Configured
) -> None:
    shorter = configured("epochs=2", f"weights={tmp_path}/gone.pt")
    made = Identity.of(shorter, {"data": None, "code": None, "weights": "abcd"})
    paths = RunPaths(tmp_path / "run")
    create_result(paths, config=shown(shorter), content=made.content, identity=made.digest)
    longer = dataclasses.replace(shorter, epochs=4)

    def is_same(**changes: Any) -> bool:
        config = dataclasses.replace(longer, **changes)
        resumed = dataclasses.replace(config, resume=str(paths.folder))
        return fingerprint.identity_of(resumed) == Identity.of(config, made.content)

    assert is_same()
    assert not is_same(gradient_accumulation=2)
    update_result(paths, identity="of one that began elsewhere")
    assert not is_same()
