"""What a run writes can be read at any time, and after any crash."""

import json
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from expt.config import secrets
from expt.config.identity import VERSION
from expt.errors import Diverged, RunFailed
from expt.runs.failure import in_one_line, read_error, write_error
from expt.runs.found import results, results_below
from expt.runs.metrics_file import MetricsReader, MetricsWriter, Point, at_best, until
from expt.runs.paths import RunPaths, at_work, write_atomically
from expt.runs.result import COMPLETED, create_result, read_result, result_of_any, update_result
from tests.facade import Capture, Patch, record_points


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path)


def test_threads_that_add_to_a_record_lose_nothing(paths: RunPaths) -> None:
    create_result(paths)
    names = ["identity", "seedless_identity", "name", "node", "backend", "rerun_of"]

    def add(name: str) -> None:
        for number in range(20):
            update_result(paths, **{name: str(number)})  # type: ignore[arg-type]

    with ThreadPoolExecutor(len(names)) as threads:
        list(threads.map(add, names))
    assert {**read_result(paths)}.items() >= dict.fromkeys(names, "19").items()


def test_a_line_that_is_being_written_is_left_for_the_next_call(paths: RunPaths) -> None:
    reader = MetricsReader(paths)
    line = json.dumps(Point(1, 1, "lr", 0.1)._asdict()).encode() + b"\n"
    with paths.metrics.open("wb", buffering=0) as file:
        file.write(line + line[:7])
        assert len(reader.read()) == 1
        assert reader.read() == []
        file.write(line[7:])
        assert reader.read() == [Point(1, 1, "lr", 0.1)]


@pytest.mark.parametrize(
    "text",
    [
        '{"status": "comp',
        "[1]",
        "7",
        '{"status": 7}',
        '{"metrics": "high"}',
        "\udcff",
        "",
        '{"a": 1}',
        '{"status": "completed", "metrics": {"a": null}, "objective": {"name": "a"}}',
    ],
)
def test_damaged_record_is_set_aside(text: str, paths: RunPaths, capsys: Capture) -> None:
    damaged = text.encode(errors="surrogateescape")
    paths.result.write_bytes(damaged)
    assert read_result(paths) == {"status": "damaged"}
    update_result(paths, status=COMPLETED)
    assert read_result(paths) == {"version": VERSION, "status": COMPLETED}
    paths.result.write_bytes(damaged)
    create_result(paths, may_exist=True, world_size=2)
    assert read_result(paths) == {"version": VERSION, "status": "running", "world_size": 2}
    asides = [paths.folder / name for name in ("result.json.corrupt", "result.json.corrupt1")]
    assert [path.read_bytes() for path in asides] == [damaged] * 2, "nothing is lost"
    told = "".join(
        f"warning: {paths.result}: is damaged, or no run's; set aside as {path}\n"
        for path in asides
    )
    assert capsys.readouterr().err == told


def test_a_folder_of_that_name_is_set_aside_whole(paths: RunPaths) -> None:
    (paths.result / "mine").mkdir(parents=True)
    assert read_result(paths) == {"status": "damaged"}
    assert result_of_any(paths) == {}, "no run"
    create_result(paths, may_exist=True, world_size=2)
    assert read_result(paths) == {"version": VERSION, "status": "running", "world_size": 2}
    assert (paths.folder / "result.json.corrupt/mine").is_dir()


@pytest.mark.parametrize("links", [True, False], ids=["", "on a disk without hard links"])
def test_new_record_appears_whole(paths: RunPaths, links: bool, monkeypatch: Patch) -> None:
    sizes, link, replace = list[int](), Path.hardlink_to, Path.replace

    def linked(path: Path, target: Path) -> None:
        if not links:
            raise OSError(95, "Operation not supported")
        sizes.append(target.stat().st_size)
        link(path, target)

    def replaced(path: Path, target: Path) -> None:
        sizes.append(path.stat().st_size)
        replace(path, target)

    monkeypatch.setattr(Path, "hardlink_to", linked)
    monkeypatch.setattr(Path, "replace", replaced)
    create_result(paths, world_size=2)
    assert sizes == [paths.result.stat().st_size]
    with pytest.raises(FileExistsError):
        create_result(paths, world_size=4)
    assert read_result(paths) == {"version": VERSION, "status": "running", "world_size": 2}
    assert os.listdir(paths.folder) == [paths.result.name]


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_a_run_that_was_killed_is_lost_where_that_can_be_seen(tmp_path: Path, where: str) -> None:
    paths = RunPaths(tmp_path / "run")
    create_result(paths, node=socket.gethostname() if where == "here" else "another-machine")

    def status() -> str:
        (run,) = results(tmp_path)
        return run.status

    with at_work(paths):
        assert status() == "running"
    assert status() == ("lost" if where == "here" else "running")
    update_result(paths, status=COMPLETED)
    assert status() == COMPLETED


def test_a_write_that_fails_leaves_the_old_file_alone(paths: RunPaths) -> None:
    create_result(paths, world_size=2)
    with pytest.raises(TypeError):
        update_result(paths, data={"mean": object()})
    with pytest.raises(UnicodeEncodeError):
        write_atomically(paths.result, "\ud800")
    assert read_result(paths) == {"version": VERSION, "status": "running", "world_size": 2}
    assert os.listdir(paths.folder) == [paths.result.name]


def failure() -> Exception:
    try:
        raise ValueError("no such label: 11")
    except ValueError as error:
        return error


def test_the_exception_that_ended_a_worker(tmp_path: Path) -> None:
    path = tmp_path / "error"
    write_error(path, failure())
    raised = read_error(path)
    assert raised is not None
    assert raised.text == "no such label: 11"
    assert raised.time_ns == path.stat().st_mtime_ns
    assert raised.traceback.startswith("Traceback (most recent call last):")
    assert raised.traceback.rstrip().endswith("ValueError: no such label: 11")
    elastic: dict[str, Any] = json.loads(path.read_text())["message"]
    assert elastic["message"] == "ValueError: no such label: 11"
    assert int(elastic["extraInfo"]["timestamp"]) > 0


@pytest.mark.parametrize(
    "length", [0, 1, 40, -1], ids=["empty", "one byte", "a part", "all but one byte"]
)
def test_a_truncated_error_is_none(tmp_path: Path, length: int) -> None:
    path = tmp_path / "error"
    write_error(path, failure())
    path.write_text(path.read_text()[:length])
    assert read_error(path) is None


@pytest.fixture
def a_secret(monkeypatch: Patch) -> str:
    """The value of a variable that a run took from the environment."""
    monkeypatch.setattr(secrets, "_texts", {"tok-12345": "${oc.env:TOKEN}"})
    return "tok-12345"


def test_no_secret_is_written(paths: RunPaths, a_secret: str) -> None:
    create_result(paths, error=f"at first {a_secret}", config={"root": [a_secret]})
    update_result(paths, error=f"then {a_secret}")
    assert read_result(paths)["error"] == "then ${oc.env:TOKEN}"
    assert a_secret not in paths.result.read_text()
    columns: Any = {"inputs": {"names": [a_secret], "scales": {a_secret: [0.0, 1.0]}}}
    update_result(paths, data=columns)  # as the data has them
    assert read_result(paths)["data"] == columns


def test_record_is_synced_before_it_is_named(paths: RunPaths, monkeypatch: Patch) -> None:
    """Else a loss of power could leave the name with nothing behind it."""
    calls, fsync, replace = list[str](), os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        calls.append(f"fsync {os.fstat(descriptor).st_size}")
        fsync(descriptor)

    def replaced(path: Path, target: Path) -> Path:
        calls.append(f"replace {path.stat().st_size}")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    write_atomically(paths.result, "12345")
    assert calls == ["fsync 5", "replace 5"]


def test_failed_record_leaves_an_empty_folder(paths: RunPaths, monkeypatch: Patch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        create_result(paths, world_size=2)
    assert os.listdir(paths.folder) == []


def leave_text(folder: Path, text: str) -> None:
    folder.mkdir(parents=True)
    RunPaths(folder).result.write_text(text)


def test_what_is_no_runs_record_is_passed_over_and_a_damaged_one_named(tmp_path: Path) -> None:
    leave_text(tmp_path / "a", '{"status": "completed"}')
    leave_text(tmp_path / "b", '{"status": "comp')
    leave_text(tmp_path / "c", '{"status": "green"}')
    leave_text(tmp_path / "d", "[1]")
    leave_text(tmp_path / "e" / "f", '{"status": "failed"}')
    for within in ("inside", "evaluations/test", ".before.tmp"):
        leave_text(tmp_path / "a" / within, '{"status": "failed"}')
    found = [(run.folder.name, run.status) for run in results(tmp_path)]
    assert found == [("a", "completed"), ("b", "damaged")]
    below = [(str(run.folder.relative_to(tmp_path)), run.status) for run in results_below(tmp_path)]
    inside = ("a/inside", "failed")  # a run that somebody has put there, as `hydra.run.dir=.` does
    assert below == [("a", "completed"), inside, ("b", "damaged"), ("e/f", "failed")]


@pytest.mark.parametrize(
    ("error", "line"),
    [
        ("", ""),
        (
            'rank 0 raised\n\nTraceback\n  File "a.py", line 1\nValueError: no\n\nlog: a.log',
            "rank 0 raised: ValueError: no  (log: a.log)",
        ),
        (  # torch's help, and a note of expt's
            'rank 0 raised\n\nTraceback\n  File "a.py", line 1, in f\n    f()\n    ^^^\n'
            "torch.AcceleratorError: CUDA error: illegal\nSearch for `cudaErrorIllegalAddress'\n"
            "Compile with `TORCH_USE_CUDA_DSA`.\n\nof model=mlp\n\nlog: a.log",
            "rank 0 raised: torch.AcceleratorError: CUDA error: illegal  (log: a.log)",
        ),
        (  # what a process of a loader raised
            'rank 0 raised\n\nTraceback\n  File "a.py", line 1\nRuntimeError: Caught ValueError\n'
            'Original Traceback:\n  File "b.py", line 2, in g\n    g()\nValueError: bad\n',
            "rank 0 raised: ValueError: bad",
        ),
        ("2 problems\n  lr=x: no number\n  model=y: no such", "2 problems: model=y: no such"),
        ("killed by SIGKILL\nlog: a.log", "killed by SIGKILL  (log: a.log)"),
        ("one line", "one line"),
    ],
)
def test_an_error_in_one_line(error: str, line: str) -> None:
    assert in_one_line(error) == line
    assert "log:" not in in_one_line(error, with_log=False)


def test_an_error_of_our_own_is_marked_as_meant_for_a_person(tmp_path: Path, a_secret: str) -> None:
    for error, expected in ((Diverged(f"nan {a_secret}"), True), (failure(), False)):
        write_error(tmp_path / "error", error)
        raised = read_error(tmp_path / "error")
        assert raised is not None
        assert (raised.expected, raised.kind) == (expected, type(error).__name__)
        assert not raised.is_refusal
        assert a_secret not in (tmp_path / "error").read_text()


def test_nan_is_null_on_disk_and_infinity_a_number(paths: RunPaths) -> None:
    nan, inf = float("nan"), float("inf")
    record_points(paths, (1, 1, {"loss/val": nan, "loss/train": inf, "lr": 0.5}))
    lines = [
        json.loads(line, parse_constant=pytest.fail)
        for line in paths.metrics.read_text().splitlines()
    ]
    assert [line["value"] for line in lines] == [None, inf, 0.5]
    assert [str(point.value) for point in MetricsReader(paths).read()] == ["nan", "inf", "0.5"]
    create_result(paths)
    objective: Any = {"name": "loss/val", "value": nan}
    update_result(paths, metrics={"loss/val": nan, "lr": 0.5}, objective=objective, epoch_s=[1.0])
    update_result(paths, seed=3)  # reads and writes it again
    written = json.loads(paths.result.read_text(), parse_constant=pytest.fail)
    assert written["metrics"] == {"loss/val": None, "lr": 0.5}
    assert written["objective"]["value"] is None
    found = read_result(paths)
    assert (str(found["metrics"]["loss/val"]), str(found["objective"]["value"])) == ("nan", "nan")
    unmeasured: Any = {"name": "loss/test", "value": None}
    update_result(paths, objective=unmeasured)
    assert read_result(paths)["objective"]["value"] is None


def test_a_line_that_is_no_point_hides_no_other(paths: RunPaths) -> None:
    point = '{"step": 1, "epoch": 1, "tag": "lr", "value": 0.5}'
    bad = ["", "{", "[1]", '{"step": 1}', '{"step": 1, "epoch": 1, "tag": "lr", "value": "much"}']
    paths.metrics.write_text("\n".join([*bad, point, ""]))
    assert MetricsReader(paths).read() == [Point(1, 1, "lr", 0.5)]


def test_a_file_that_was_cut_back_and_has_grown_again_is_read_anew(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    reader, writer = MetricsReader(paths), MetricsWriter(paths)
    writer.write(1, 1, {"loss": 0.5})
    assert [point.step for point in reader.read()] == [1]
    writer.write(2, 1, {"loss": 0.25, "speed": 1.0})
    assert [point.step for point in reader.read()] == [2, 2]
    writer.close()
    paths.metrics.write_text(paths.metrics.read_text().splitlines()[0] + "\n")
    writer = MetricsWriter(paths)
    writer.write(2, 1, {"loss": 0.25, "speed": 1.0625})
    writer.write(3, 1, {"loss": 0.125})
    writer.close()
    assert [point.step for point in reader.read()] == [1, 2, 2, 3]
    assert reader.read() == []


def test_checkpointed_part_of_a_rewritten_file_is_found_by_steps(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    writer, sizes = MetricsWriter(paths), list[int]()
    for step in (1, 2, 3):
        writer.write(step, 1, {"loss": 0.5, "speed": 1000.0 + step})
        sizes.append(writer.num_bytes)
    writer.close()
    text = paths.metrics.read_bytes()
    assert [until(paths, size, step) for step, size in zip((1, 2, 3), sizes, strict=True)] == [
        text[:size] for size in sizes
    ]
    paths.metrics.write_bytes(text.replace(b"1001.0", b"999.25"))
    for size in (sizes[1] - 1, sizes[2], sizes[1] + 9):
        assert until(paths, size, 2) == text[: sizes[1]].replace(b"1001.0", b"999.25")
    assert until(RunPaths(tmp_path / "none"), 9, 2) == b""
    writer = MetricsWriter(paths)
    writer.write(3, 1, {"loss/test": 0.25})
    writer.close()
    tested = paths.metrics.read_bytes()
    assert until(paths, sizes[2] - 1, 3) == tested[: sizes[2]], "the test comes later"
    assert until(paths, sizes[2] - 1, 3, tests_later=False) == tested


def _lines(paths: RunPaths) -> list[bytes]:
    writer = MetricsWriter(paths)
    for step in range(1, 21):
        writer.write(step, 1, {"loss/train": float(step)})
    writer.close()
    return paths.metrics.read_bytes().splitlines(keepends=True)


@pytest.mark.parametrize(
    "damage",
    [
        lambda lines: [*lines[:4], b"\0" * 60 + b"\n", *lines[5:]],
        lambda lines: [*lines[:4], lines[4][:20] + lines[5], *lines[6:]],
        lambda lines: [*lines[:4], lines[4][:20] + b"\n", *lines[5:]],
        lambda lines: [*lines[:4], b"\n", *lines[5:]],
        lambda lines: [*lines[:4], lines[4].replace(b"step", b"st\xff\xfe"), *lines[5:]],
    ],
)
@pytest.mark.parametrize("how", ["curve", "best", "resume"])
def test_damaged_lines_are_reported_once(
    paths: RunPaths, capsys: Capture, damage: Any, how: str
) -> None:
    lines = damage(_lines(paths))
    ways: dict[str, Any] = {
        "curve": lambda: MetricsReader(paths).read(),
        "best": lambda: at_best(paths, "loss/train", {"epoch": 1}),
        "resume": lambda: until(paths, len(b"".join(lines[:15])), 15),
    }
    ways[how]()
    assert capsys.readouterr().err == ""
    paths.metrics.write_bytes(b"".join(lines))
    for _ in range(2):
        ways[how]()
    (told,) = capsys.readouterr().err.splitlines()
    size = 15 if how == "resume" else len(lines)
    assert f"metrics.jsonl: 1 of {size} lines ({1 / size:.1%})" in told
    assert "such as line 5: " in told


def test_points_that_a_file_has_lost_are_reported_at_a_resume(
    paths: RunPaths, capsys: Capture
) -> None:
    lines = _lines(paths)
    size = len(b"".join(lines[:15]))
    paths.metrics.write_bytes(b"".join(lines)[: size - 17])
    for _ in range(2):
        assert until(paths, size, 15) == b"".join(lines[:14])
    (told,) = capsys.readouterr().err.splitlines()
    assert f"17 of the {size} bytes" in told
    assert "after line 14" in told
    paths.metrics.write_bytes(b"".join(lines[:14]) + lines[14][:9])  # one that is being written
    assert len(MetricsReader(paths).read()) == 14
    assert at_best(paths, "loss/train", {"epoch": 1}) == 14
    assert capsys.readouterr().err == ""


def test_a_writer_whose_folder_was_renamed_writes_no_second_one(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    paths.folder.mkdir()
    writer = MetricsWriter(paths)
    writer.write(1, 1, {"loss/train": 0.5})
    paths.folder.rename(tmp_path / "renamed")
    with pytest.raises(RunFailed, match="run was renamed or removed"):
        writer.write(2, 1, {"loss/train": 0.4})
    writer.close()
