"""W&B's offline mode: what its own file holds of a run, read back."""

import json
import struct
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from expt.dashboards.trackers.wandb import WandbCopy
from expt.runs.metrics_file import Point
from tests.facade import Capture, RunFolder, as_typed, run

HEADER, BLOCK = 7, 32768
WHOLE, LAST = 1, 4
RUN = ("hydra.run.dir=run", "tensorboard.norms=false", "wandb.project=tests", "wandb.tags=[a,b]")


@pytest.fixture(autouse=True)
def _installed() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what packages of others say at their import
        pytest.importorskip("wandb", exc_type=ImportError)
        pytest.importorskip("wandb.proto.wandb_internal_pb2", exc_type=ImportError)


def records(path: Path, kind: str) -> Iterator[Any]:
    """The records of a kind in a .wandb file, in LevelDB's log format."""
    from wandb.proto import wandb_internal_pb2

    kinds: Any = wandb_internal_pb2
    data, at, part = path.read_bytes(), HEADER, b""
    while at + HEADER <= len(data):
        if (left := BLOCK - at % BLOCK) < HEADER:
            at += left
            continue
        _, size, place = struct.unpack_from("<IHB", data, at)
        part += data[at + HEADER : at + HEADER + size]
        at += HEADER + size
        if place in (WHOLE, LAST):
            record, part = kinds.Record.FromString(part), b""
            if record.WhichOneof("record_type") == kind:
                yield getattr(record, kind)


def rows(path: Path) -> list[dict[str, Any]]:
    found = records(path, "history")
    return [{_key(item): json.loads(item.value_json) for item in history.item} for history in found]


def _key(item: Any) -> str:
    return "".join(item.nested_key) or str(item.key)


def parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("wandb/offline-run-*/*.wandb"))


@pytest.mark.slow
def test_a_run_kept_offline_half_live_and_half_later_has_each_point_once(tmp_path: Path) -> None:
    offline = {"WANDB_MODE": "offline"}
    done = run(*RUN, "send=wandb", "epochs=2", cwd=tmp_path, **offline)
    assert done.returncode == 0, done.stderr
    assert "kept offline in" in done.stdout
    assert len(parts(tmp_path / "run")) == 1
    again = run("send", "run", cwd=tmp_path, **offline)
    assert "0 of 1 runs had something new" in again.stdout
    assert len(parts(tmp_path / "run")) == 1
    assert (
        run("hydra.run.dir=run", "resume=auto", "epochs=4", "send=null", cwd=tmp_path).returncode
        == 0
    )
    later = run("send", "run", "--to", "wandb", cwd=tmp_path, **offline)
    assert "1 of 1 runs had something new" in later.stdout
    there = parts(tmp_path / "run")
    assert len({path.stem for path in there}) == 1, "one run of W&B's"
    assert len(there) == 2

    here, points = RunFolder(tmp_path / "run"), [row for path in there for row in rows(path)]
    for tag in ("loss/train", "loss/val", "accuracy/val", "lr"):
        assert [(row["_step"], row[tag]) for row in points if tag in row] == here.curve(tag)
    assert Counter(row["_step"] for row in points).most_common(1)[0][1] == 1
    begun, *_ = records(there[0], "run")
    assert (begun.project, begun.display_name, list(begun.tags)) == ("tests", "run", ["a", "b"])
    assert [each.exit_code for each in records(there[1], "exit")] == [0]
    configs = records(there[0], "config")
    config = {_key(item): item.value_json for part in configs for item in part.update}
    assert config["optimizer.lr"] == "0.05"


@pytest.mark.slow
def test_a_failed_sweep_is_a_group(tmp_path: Path) -> None:
    words = (
        "-m",
        *as_typed("seed=0,1 epochs=2 send=wandb hydra.sweep.dir=grid tensorboard.norms=false"),
    )
    done = run(*words, cwd=tmp_path, WANDB_MODE="offline", EXPT_FAULT="0:25:raise")
    assert done.returncode == 1, done.stderr
    there = [*tmp_path.glob("grid/*/wandb/offline-run-*/*.wandb")]
    begun = [each for path in there for each in records(path, "run")]
    assert {each.run_group for each in begun} == {"grid"}
    assert len({each.run_id for each in begun}) == 2
    assert [each.exit_code for path in there for each in records(path, "exit")] == [1, 1]


def test_a_value_that_is_refused_takes_no_other_along(capsys: Capture) -> None:
    import wandb

    taken = dict[str, Any]()

    def update(some: dict[str, Any], **_: Any) -> None:
        if {"bad"} & some.keys():
            raise TypeError("no bad")
        taken.update(some)

    copy: Any = object.__new__(WandbCopy)
    copy._wandb, copy._state, copy._next = wandb, {}, 0
    copy._run = SimpleNamespace(config=SimpleNamespace(update=update), log=update)
    copy.describe(SimpleNamespace(settings={"lr": 0.1, "bad": 1, "seed": 0}, tags={"user": "me"}))
    copy.add([Point(3, 1, tag, 0.5) for tag in ("a", "bad", "b")], 0.0)
    assert taken.keys() == {"lr", "seed", "user", "a", "b"}
    assert (copy._state["next_step"], len(capsys.readouterr().err.splitlines())) == (4, 1)
    copy._run.log = lambda *_, **__: 1 / 0
    with pytest.raises(ZeroDivisionError):  # no refusal: it is tried again
        copy.add([Point(4, 1, "a", 0.5)], 0.0)
    assert copy._state["next_step"] == 4
