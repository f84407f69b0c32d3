"""A try at a run, as its record tells it from the first moment to the end."""

import dataclasses
import os
import socket
import time
from pathlib import Path

import pytest

from expt.config.identity import VERSION, Content
from expt.data.fingerprint import identity_of
from expt.errors import CheckpointError, ConfigError, DataError, Interrupted, RunFailed
from expt.runs import checkpoint, continuing
from expt.runs.attempt import Attempt, Rollback, record_end, record_refusal, take_back
from expt.runs.paths import EVENT_FILES, RunPaths
from expt.runs.request import RunRequest
from expt.runs.result import create_result, read_result, result_of_any, update_result
from tests.facade import Capture, Patch, checkpoint_state, record_points, request


def attempt(asked: RunRequest, number: int = 0) -> Attempt:
    asked = dataclasses.replace(asked, typed_at=asked.typed_at or 20.0)
    return Attempt(request=asked, number=number, devices=("3", "4"))


def leave_metrics(paths: RunPaths) -> None:
    """What an attempt has recorded that came to no checkpoint."""
    record_points(paths, (1, 1, {"loss/train": 0.5}))
    (paths.folder / f"{EVENT_FILES}1").touch()


def test_the_first_record(tmp_path: Path) -> None:
    asked = request(tmp_path / "lr=1", world_size=2, seed=5)
    assert attempt(asked).begin(port=1234) is None
    found, host = read_result(asked.paths), socket.gethostname()
    expected = {
        "version": VERSION, "status": "running", "world_size": 2, "local_world_size": 2,
        "node": host, "hosts": [{"name": host, "ranks": [0, 1]}], "backend": "gloo",
        "devices": ["3", "4"], "master_port": 1234, "attempts": 1,
        "identity": asked.identity.digest, "seedless_identity": asked.identity.seedless,
        "content": {}, "seed": 5, "name": "lr=1", "overrides": {"seed": 0},
        "arguments": ["seed=0"],
    }  # fmt: skip
    assert {key: value for key, value in found.items() if key in expected} == expected
    assert found.keys() - expected.keys() == {
        "started", "config", "command", "versions", "git", "hardware",
    }  # fmt: skip


def test_one_worker_needs_no_backend_and_what_was_typed_counts(tmp_path: Path) -> None:
    asked = request(
        tmp_path, typed_at=time.monotonic() - 60
    )  # whatever was done to the clock since
    attempt(asked).begin()
    found = read_result(asked.paths)
    assert (found["backend"], found["master_port"]) == (None, None)
    assert found["started"] == pytest.approx(time.time() - 60, abs=10)


def test_without_checkpoint_the_record_begins_again(tmp_path: Path, capsys: Capture) -> None:
    asked = request(tmp_path, may_have_run=True)
    attempt(asked).begin()
    leave_metrics(asked.paths)
    assert attempt(asked, 1).begin() is None
    assert not asked.paths.metrics.exists()
    assert not asked.paths.event_files()
    assert read_result(asked.paths)["attempts"] == 2
    assert "has no checkpoint, the run starts from the beginning" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.out.tfevents.123.other"])
@pytest.mark.parametrize("record", [None, '{"accuracy": 1}', '{"status": "completed"}', "{"])
def test_foreign_numbers(tmp_path: Path, record: str | None, name: str, capsys: Capture) -> None:
    asked = request(tmp_path, may_have_run=True)
    theirs = asked.paths.folder / name
    theirs.write_text("mine\n")
    if record is not None:
        asked.paths.result.write_text(record)
    if record == '{"status": "completed"}' and name != "metrics.jsonl":
        attempt(asked).begin()  # as one leaves it that was refused
        return
    with pytest.raises(ConfigError, match=f"{name}: no record next to it"):
        attempt(asked).begin()
    assert theirs.read_text() == "mine\n"
    assert record is None or asked.paths.result.read_text() == record
    assert capsys.readouterr().err == "", "nothing is said to begin"


@pytest.mark.parametrize("name", ["checkpoints/best-mine.safetensors", "code/a.py", "tokenizer/a"])
def test_files_that_no_record_claims_are_not_taken(tmp_path: Path, name: str) -> None:
    asked = request(tmp_path, may_have_run=True)
    (theirs := tmp_path / name).parent.mkdir()
    theirs.write_text("mine")
    (tmp_path / "metrics.jsonl").write_text("mine")
    for each in (asked, dataclasses.replace(asked, may_have_run=False)):
        with pytest.raises(ConfigError, match="says that it is expt"):
            attempt(each).begin()
    assert theirs.read_text() == (tmp_path / "metrics.jsonl").read_text() == "mine"


@pytest.mark.parametrize("name", ["checkpoints", "result.json", "logs"])
def test_a_run_on_a_disk_that_is_not_mounted_begins_nowhere(tmp_path: Path, name: str) -> None:
    asked = request(tmp_path, may_have_run=True)
    attempt(asked).begin()
    leave_metrics(asked.paths)
    asked.paths.result.rename(tmp_path / "elsewhere") if name == "result.json" else None
    (tmp_path / name).symlink_to("unmounted")
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    with pytest.raises(ConfigError, match=f"{name}: is a link to unmounted"):
        attempt(asked, 1).begin()
    assert {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")} == before


def test_hydra_files_of_another_program_stay(tmp_path: Path) -> None:
    asked = request(tmp_path, may_have_run=True)
    (theirs := asked.paths.hydra / "config.yaml").parent.mkdir()
    theirs.write_text("mine")
    with pytest.raises(ConfigError, match=r"\.hydra: no record next to it"):
        attempt(dataclasses.replace(asked, hydra={"config": "new"})).begin()
    assert theirs.read_text() == "mine"
    attempt(asked).begin()  # of a sweep, which has written them


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (RunFailed("no"), "failed", "no"),
        (KeyboardInterrupt(), "interrupted", "interrupted (Ctrl-C)"),
        (Interrupted("asked"), "interrupted", "asked"),
        (ValueError("a bug"), "failed", "a bug"),
    ],
)
def test_end_is_recorded(tmp_path: Path, error: BaseException, status: str, text: str) -> None:
    asked = request(tmp_path)
    with pytest.raises(type(error)), attempt(asked).recorded():
        raise error
    found = read_result(asked.paths)
    assert (found["status"], found["error"]) == (status, text)


def test_what_it_came_to_before_its_end_is_kept(tmp_path: Path) -> None:
    asked = request(tmp_path)
    attempt(asked).begin()
    for epoch, (reached, best) in enumerate([(0.5, 0.5), (0.7, 0.7), (0.6, 0.7)], start=1):
        tested = {"accuracy/val": reached, "best/accuracy/val": best}
        record_points(asked.paths, (8 * epoch, epoch, {"speed/epoch_s": 2.0 * epoch, **tested}))
    record_points(asked.paths, (25, 4, {"running/loss": 0.25}))
    expected = {
        "metrics": {
            "speed/epoch_s": 6.0,
            "accuracy/val": 0.6,
            "best/accuracy/val": 0.7,
            "running/loss": 0.25,
        },
        "best": {"metric": "accuracy/val", "value": 0.7, "epoch": 2, "step": 16},
        "objective": {"name": "accuracy/val", "value": 0.7},
        "epoch_s": [2.0, 4.0, 6.0],
    }
    under_way = result_of_any(asked.paths)
    record_end(asked.paths, RunFailed("no"))
    failed = result_of_any(asked.paths)
    for found in (under_way, failed):
        assert {key: value for key, value in found.items() if key in expected} == expected
    assert (under_way["status"], failed["status"]) == ("lost", "failed")


def test_an_error_without_words_is_no_interrupt(tmp_path: Path) -> None:
    asked = gone_on_from(tmp_path / "run")
    attempt(asked).begin()
    record_end(asked.paths, AssertionError())
    record = result_of_any(asked.paths)
    assert (record["status"], record["error"]) == ("failed", "AssertionError()")


def test_a_record_that_cannot_be_written_hides_no_error(tmp_path: Path, capsys: Capture) -> None:
    asked = request(tmp_path / "run")
    record_end(asked.paths, RunFailed("no"))  # its folder is gone
    assert capsys.readouterr().err.startswith(
        f"warning: {asked.paths.result}: could not be written ("
    )


def test_a_run_that_goes_on_keeps_where_its_weights_came_from(tmp_path: Path) -> None:
    file = tmp_path / "file.pt"
    file.write_bytes(b"one")
    then: Content = {"data": None, "code": None, "weights": "of then"}
    first = request(tmp_path / "run", weights=str(file), content=then)
    attempt(first).begin()
    began = read_result(first.paths)
    assert began["weights_from"] == {"file": str(file), "identity": None, "checksum": "of then"}
    checkpoint.save(first.paths.last, checkpoint_state(first.config, 2))
    file.write_bytes(b"another")
    config = dataclasses.replace(first.config, resume="auto")
    known = identity_of(config, first.paths)
    attempt(dataclasses.replace(first, config=config, identity=known), 1).begin()
    now = read_result(first.paths)
    assert {key: now[key] for key in ("weights_from", "identity", "content")} == {
        key: began[key] for key in ("weights_from", "identity", "content")
    }
    assert now["resumed_from"]["step"] == 2


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def gone_on_from(folder: Path) -> RunRequest:
    """That of a run which has recorded a number after its checkpoint."""
    asked = request(folder, may_have_run=True)
    attempt(asked).begin()
    leave_metrics(asked.paths)
    checkpoint.save(asked.paths.last, checkpoint_state(asked.config, 1))
    update_result(asked.paths, status="completed")
    return asked


def test_a_run_that_a_person_goes_on_with_is_still_that_of_its_search(tmp_path: Path) -> None:
    asked = gone_on_from(tmp_path / "run")
    update_result(asked.paths, search={"number": 3})
    longer = request(tmp_path / "run", may_have_run=True, epochs=99)
    attempt(longer).begin()
    found = read_result(asked.paths)
    assert found["search"] == {"number": 3}
    asked.paths.remove_checkpoints()
    attempt(longer).begin()
    assert read_result(asked.paths)["search"]["number"] == 3, "from its beginning"
    attempt(asked).begin()
    assert "search" not in read_result(asked.paths), "a run of other settings"


@pytest.mark.parametrize(
    "error", [DataError("it has other samples"), Interrupted("Ctrl-C"), KeyboardInterrupt()]
)
def test_where_it_ends_before_its_first_step_all_is_as_before(
    error: BaseException, tmp_path: Path
) -> None:
    asked = gone_on_from(tmp_path / "run")
    before = contents(tmp_path)
    for _ in range(2):
        assert attempt(asked).begin() == asked.paths.last
        assert asked.paths.metrics.read_bytes() == b""
    record_end(asked.paths, error)
    assert contents(tmp_path) == before
    elsewhere = request(tmp_path / "other", resume=str(asked.paths.folder))
    attempt(elsewhere).begin()
    record_end(elsewhere.paths, DataError("it has other samples"))
    assert read_result(elsewhere.paths)["status"] == "failed"
    assert not elsewhere.paths.has_trained(), "so that what was refused can be removed"


@pytest.mark.parametrize("name", ["result.json", "metrics.jsonl", ".before.tmp"])
def test_a_run_is_put_back_even_if_that_is_killed_after_any_file(
    name: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    asked = gone_on_from(tmp_path / "run")
    before, replace = contents(tmp_path), os.replace
    attempt(asked).begin()

    def replaced(self: Path, target: Path) -> None:
        replace(self, target)
        if target.name == name:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", replaced)
        patch.setattr(Path, "rename", replaced)
        with pytest.raises(KeyboardInterrupt):
            Rollback(asked.paths).restore()
    if name != ".before.tmp":  # it was put back, and its copy is on its way out
        record_end(asked.paths, DataError("it has other samples"))
    assert {x: y for x, y in contents(tmp_path).items() if ".before.tmp" not in x} == before


@pytest.mark.parametrize("was_there", [False, True])
def test_an_attempt_without_a_step_can_be_taken_back(tmp_path: Path, was_there: bool) -> None:
    asked = gone_on_from(tmp_path / "run") if was_there else request(tmp_path / "run")
    asked = asked if was_there else dataclasses.replace(asked, hydra={"config": "a: 1"})
    asked.paths.folder.mkdir(exist_ok=True)
    before, number = contents(tmp_path), int(was_there)
    attempt(asked, number).begin()
    log = asked.paths.stderr(number, 0)
    log.parent.mkdir(parents=True)
    log.touch()
    take_back(asked, RunFailed("a GPU is lost"))
    assert contents(tmp_path) == before


def test_an_attempt_that_began_a_record_again_is_not_taken_back(tmp_path: Path) -> None:
    asked = request(tmp_path / "run", resume="auto")
    asked.paths.stderr(1, 0).parent.mkdir(parents=True)
    attempt(asked, 1).begin()
    take_back(asked, RunFailed("a GPU is lost"))
    assert read_result(asked.paths)["error"] == "a GPU is lost"


def test_a_checkpoint_that_cannot_be_taken_ends_it(tmp_path: Path, monkeypatch: Patch) -> None:
    def take(*_: object) -> Path:
        raise CheckpointError("is damaged")

    asked = gone_on_from(tmp_path)
    monkeypatch.setattr(continuing, "take", take)
    with pytest.raises(CheckpointError):
        attempt(asked).begin()
    assert read_result(asked.paths)["status"] == "completed", "as before"


@pytest.mark.parametrize("accepted", [True, False])
def test_what_ends_it_later_is_recorded(tmp_path: Path, accepted: bool) -> None:
    asked = gone_on_from(tmp_path)
    attempt(asked).begin()
    if accepted:
        Rollback(asked.paths).commit()
    record_end(asked.paths, DataError("sample 3") if accepted else RunFailed("killed"))
    assert read_result(asked.paths)["status"] == "failed"


def test_weights_of_a_running_run_are_warned_of(tmp_path: Path, capsys: Capture) -> None:
    paths = RunPaths(tmp_path / "source")
    create_result(paths, identity="abc", node="another machine")
    asked = request(tmp_path / "run", weights=str(paths.folder))
    checkpoint.save(paths.best, checkpoint_state(asked.config, 2))
    attempt(asked).begin()
    assert capsys.readouterr().err.startswith(f"warning: weights={paths.folder}: ")
    assert read_result(RunPaths(tmp_path / "run"))["weights_from"]["identity"] == "abc"


def test_a_folder_with_a_run_is_refused(tmp_path: Path) -> None:
    asked = dataclasses.replace(request(tmp_path), hydra={"overrides": "theirs"})
    attempt(request(tmp_path)).begin()
    leave_metrics(asked.paths)
    with pytest.raises(ConfigError, match="holds a run already"), attempt(asked).recorded():
        raise AssertionError
    assert not asked.paths.hydra.exists()
    assert asked.paths.metrics.exists()


@pytest.mark.parametrize("known", [True, False])
def test_a_refusal_is_recorded_with_what_is_known(tmp_path: Path, known: bool) -> None:
    asked = dataclasses.replace(request(tmp_path / "lr=x"))
    record_refusal(
        asked.paths, asked.about, asked if known else None, ConfigError("lr=x: no number")
    )
    found = read_result(asked.paths)
    assert found["status"] == "failed"
    assert found["error"] == "lr=x: no number"
    assert found["arguments"] == ["seed=0"]
    assert ("identity" in found, "config" in found) == (known, known)
