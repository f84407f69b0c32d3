"""One run's workers as the pool looks at them, with processes that have already ended."""

import json
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from expt.errors import ConfigError, DataError, DeviceLost, Interrupted, RunFailed, TimedOut
from expt.launch import last_word, processes
from expt.launch.forkserver import FINISHED, Work
from expt.launch.workers import LATE_S, Aftermath, Workers, start
from expt.runs.attempt import Attempt
from expt.runs.failure import write_error
from expt.runs.paths import RunPaths, at_work
from expt.runs.result import COMPLETED, create_result, read_result
from expt.worker.fault import VARIABLE
from tests.facade import Patch, environment, request
from tests.faults.running import wait_until


def workers(folder: Path, *codes: int | None) -> Workers:
    """Workers with these exit codes; None is alive."""
    processes: list[Any] = [
        SimpleNamespace(
            exitcode=code,
            pid=0,
            sentinel=rank,
            is_gone=True,
            send_signal=lambda number: None,
            close=lambda: None,
        )
        for rank, code in enumerate(codes)
    ]
    return Workers(RunPaths(folder), 0, 60.0, processes)


def test_workers_get_no_settings_that_are_parsed_already(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """Workers would import the parser of YAML for them."""
    given, sent = request(tmp_path / "run", typed_at=0.0), list[bytes]()
    assert b"expt.config.parse" in pickle.dumps(given)
    ended = SimpleNamespace(exitcode=FINISHED)

    def start_process(work: Work) -> SimpleNamespace:
        sent.append(pickle.dumps(work))
        return ended

    monkeypatch.setattr(processes, "start", start_process)
    start(Attempt(request=given, devices=()))
    assert len(sent) == 1
    assert b"expt.config.parse" not in sent[0]


def test_the_driver_is_woken_by_those_alone_that_it_has_not_seen_ended(tmp_path: Path) -> None:
    found = workers(tmp_path, None, FINISHED)
    assert found.sentinels == [0, 1], "one that has ended since must wake it"
    found.poll()
    assert found.sentinels == [0]


@pytest.mark.parametrize(("status", "end"), [("interrupted", Interrupted), ("running", RunFailed)])
def test_missing_result_is_a_failure(status: str, end: type[Exception], tmp_path: Path) -> None:
    create_result(RunPaths(tmp_path), status=status)
    with pytest.raises(end) as caught:
        workers(tmp_path, FINISHED).poll()
    assert caught.type is end


@pytest.mark.parametrize("code", [0, 1])
def test_unknown_exit_code_is_a_failure(tmp_path: Path, code: int) -> None:
    create_result(RunPaths(tmp_path), status="completed")
    with pytest.raises(RunFailed, match=f"rank 1 of 2 exited with code {code}"):
        workers(tmp_path, FINISHED, code).poll()


class Ending(SimpleNamespace):
    """A process that fails as soon as it was seen alive."""

    ended = False

    @property
    def exitcode(self) -> int | None:
        self.ended, before = True, self.ended
        return 1 if before else None


def test_who_fails_while_it_is_looked_at_has_failed(tmp_path: Path) -> None:
    create_result(RunPaths(tmp_path))
    process: Any = Ending(pid=0, sentinel=0, is_gone=True, send_signal=lambda number: None)
    found = Workers(RunPaths(tmp_path), 0, 60.0, [process])
    assert found.poll() is False
    with pytest.raises(RunFailed, match="rank 0 of 1 exited with code 1"):
        found.poll()


def test_who_knows_why_others_were_lost_is_waited_for(tmp_path: Path, monkeypatch: Patch) -> None:
    create_result(RunPaths(tmp_path))
    found = workers(tmp_path, None, 1)
    leave_error(found.paths, 1, RuntimeError("Connection closed by peer"), 10)

    def wait_for_all(_: object, timeout_s: float, **__: object) -> None:
        if (
            timeout_s == LATE_S
        ):  # and not where all are ended, nor in the moment that each failure is given
            leave_error(found.paths, 0, ConfigError("a=1: is none"), 11)
            found.processes[0].exitcode = 2  # type: ignore[misc]

    monkeypatch.setattr(processes, "wait_for_all", wait_for_all)
    with pytest.raises(ConfigError, match=r"^a=1: is none$"):
        found.poll()


def test_a_worker_killed_while_waited_for_is_named(tmp_path: Path, monkeypatch: Patch) -> None:
    found = workers(tmp_path, 1, None)
    leave_error(found.paths, 0, TimedOut("waited in vain"), 10)

    def wait_for_all(_: object, timeout_s: float, **__: object) -> None:
        if timeout_s == LATE_S:
            found.processes[1].exitcode = KILLED  # type: ignore[misc]

    monkeypatch.setattr(processes, "wait_for_all", wait_for_all)
    with pytest.raises(RunFailed, match=r"^rank 1 of 2 was killed by SIGKILL"):
        found.poll()


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path)


def leave_error(paths: RunPaths, rank: int, error: Exception, second: int) -> None:
    """The word of a worker that raised at this second."""
    path = paths.error(0, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        raise error
    except Exception as raised:
        write_error(path, raised)
    os.utime(path, (second, second))


def leave_log(paths: RunPaths, rank: int, text: str) -> None:
    path = paths.stderr(0, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_first_that_raised_is_named(paths: RunPaths) -> None:
    for rank, second in ((0, 30), (1, 10), (2, 20)):
        leave_error(paths, rank, ValueError(f"of rank {rank}"), second)
    text = str(Aftermath(paths, 0, [1, 1, 1]).in_words())
    assert text.startswith("rank 1 of 3 raised\n\nTraceback (most recent call last):")
    assert text.endswith(f"ValueError: of rank 1\n\nlog: {paths.stderr(0, 1)}")


LOST = RuntimeError(
    "[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"
)
REFUSED = DataError("train/0.png has changed")


@pytest.mark.parametrize(
    "lost_code", [1, -signal.SIGABRT, None], ids=["raised", "aborted", "alive"]
)
@pytest.mark.parametrize("refused_code", [2, None], ids=["ended", "about to end"])
@pytest.mark.parametrize("second", [9, 10, 11], ids=["earlier", "at the same time", "later"])
def test_bad_input_is_told_and_not_what_others_make_of_its_end(
    paths: RunPaths, second: int, refused_code: int | None, lost_code: int | None
) -> None:
    leave_log(paths, 0, "terminate called")
    if lost_code == 1:
        leave_error(paths, 0, LOST, 10)
    leave_error(paths, 1, REFUSED, second)
    after = Aftermath(paths, 0, [lost_code, refused_code])
    assert not after.first.has_lost_others
    told = after.in_words()
    assert (type(told), str(told)) == (DataError, str(REFUSED))


def test_a_mistake_is_told_and_not_what_others_make_of_its_end(paths: RunPaths) -> None:
    for rank, error in enumerate((LOST, ValueError("its own"), LOST)):
        leave_error(paths, rank, error, 10)  # of one tick of the file system's clock
    assert "ValueError: its own" in str(Aftermath(paths, 0, [1, 1, 1]).in_words())
    after = Aftermath(paths, 0, [1, None, 1])
    assert after.first.has_lost_others, "who knows why is about to say so"
    assert not Aftermath(paths, 0, [None, 1, None]).first.has_lost_others


ABORTED, KILLED = -signal.SIGABRT, -signal.SIGKILL
NCCL_LOST = "ncclRemoteError: ...\n... we are taking the entire process down."
MISMATCH = "[enforce fail at pair.cc:464] 82624 vs 4192. Is there a distributed collective mismatch"
OF_CPP = f"terminate called after throwing an instance of 'X'\n  what():  {MISMATCH}"
OWN, LATE = (ValueError("its own"), 20), (TimedOut("waited in vain"), 9)
# Who waits for the device gets no further either, and may notice first.
GAVE_UP = "[E] Watchdog caught collective operation timeout: WorkNCCL"
STUCK = [
    (TimedOut(f"stuck at {progress}", progress=progress), second)
    for second, progress in ((10, [7, 9]), (11, [6, 9]), (12, [7, 8]))
]
Left = tuple[Exception, int]


@pytest.mark.parametrize(
    ("codes", "errors", "logs", "told"),
    [
        ([1, KILLED, None], {0: OWN}, {}, ["rank 1 of 3 was killed by SIGKILL"]),
        ([-35], {}, {}, ["rank 0 of 1 was killed by signal 35\n"]),
        ([FINISHED, 1], {1: OWN}, {}, ["rank 1 of 2 raised"]),
        ([ABORTED, 1], {1: OWN}, {0: NCCL_LOST}, ["rank 1 of 2 raised", "ValueError: its own"]),
        ([ABORTED, 1], {1: OWN}, {0: "free(): invalid"}, ["rank 0 of 2 was killed by SIGABRT"]),
        ([ABORTED], {}, {0: OF_CPP}, ["rank 0 of 1", MISMATCH]),
        ([ABORTED] * 2, {}, {0: NCCL_LOST, 1: NCCL_LOST}, ["rank 0 of 2 was killed by SIGABRT"]),
        ([1] * 3, dict(enumerate(STUCK)), {}, ["rank 1 of 3: stuck at [6, 9]\n"]),
        ([1] * 3, {0: STUCK[0], 1: STUCK[1], 2: LATE}, {}, ["rank 2 of 3: waited in vain\n"]),
    ],
    ids=["vanished", "a signal without a name", "others finished", "ended by nccl",
         "aborted by itself", "an exception of C++", "all ended by nccl", "the least far",
         "stuck and late"],
)  # fmt: skip
def test_who_is_named(
    codes: list[int | None], errors: dict[int, Left], logs: dict[int, str], told: list[str],
    paths: RunPaths,
) -> None:  # fmt: skip
    for rank, (error, second) in errors.items():
        leave_error(paths, rank, error, second)
    for rank, text in logs.items():
        leave_log(paths, rank, text)
    after = Aftermath(paths, 0, codes)
    found = str(after.in_words())
    assert found.startswith(told[0])
    assert all(text in found for text in told)
    assert after.first.is_stuck == (errors == dict(enumerate(STUCK)))


@pytest.mark.parametrize(
    ("raised", "code", "log", "expected"),
    [
        (TimedOut("waited for 60 s"), 1, "", True),
        (RunFailed("no memory"), 1, "", False),
        (None, ABORTED, GAVE_UP, True),
        (None, ABORTED, "terminate called", False),
        (None, KILLED, GAVE_UP, False),
    ],
    ids=["said so", "another error", "nccl gave up", "aborted", "killed"],
)
def test_whether_someone_waited_in_vain(
    paths: RunPaths, raised: Exception | None, code: int, log: str, expected: bool
) -> None:
    leave_log(paths, 0, log)
    if raised:
        leave_error(paths, 0, raised, 10)
    assert Aftermath(paths, 0, [code, None]).first.waited_in_vain is expected


def test_a_folder_that_is_gone_with_those_around_it_is_named(tmp_path: Path) -> None:
    after = Aftermath(RunPaths(tmp_path / "sweeps" / "mine" / "seed=1"), 0, [1])
    assert "seed=1 was renamed or removed" in str(after.in_words())


def test_a_worker_that_is_gone_can_dump_nothing(tmp_path: Path, monkeypatch: Patch) -> None:
    found = workers(tmp_path, 1, None)
    leave_error(found.paths, 0, TimedOut("waited in vain"), 10)
    asked = list[int]()
    found.processes[1].send_signal = asked.append  # type: ignore[assignment]
    monkeypatch.setattr(processes, "wait_for_all", lambda *_, **__: None)
    with pytest.raises(RunFailed, match=r"^rank 0 of 2: waited in vain\n"):
        found.poll()
    assert asked == [signal.SIGKILL], "it never had a log, and so isn't asked for its stacks"


NCCL = (
    "[rank0]:[E] ProcessGroupNCCL.cpp: ... we are taking the entire process down.\nFatal Python"
    " error: Aborted\n"
)


@pytest.fixture
def recorded(tmp_path: Path) -> RunPaths:
    found = RunPaths(tmp_path)
    create_result(found, world_size=2)
    for rank in (0, 1):
        found.stderr(0, rank).parent.mkdir(parents=True)
        found.stderr(0, rank).write_text("")
    return found


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("Segmentation fault", "SIGSEGV"),
        ("Floating point exception", "SIGFPE"),
        ("Floating-point exception", "SIGFPE"),
    ],
)
def test_a_rank_that_aborted_is_named_before_one_that_was_killed_for_it(
    words: str, name: str, recorded: RunPaths
) -> None:
    recorded.stderr(0, 1).write_text(f"Fatal Python error: {words}\n\nThread 0x1\n")
    last_word.write_end(recorded.folder, 0)
    assert read_result(recorded)["error"].startswith(f"rank 1 of 2 was killed by {name}\n")


def test_of_an_end_without_a_trace_only_that_is_said(recorded: RunPaths) -> None:
    leave_error(recorded, 1, RuntimeError("Connection closed by peer"), 10)
    last_word.write_end(recorded.folder, 0)
    assert (
        read_result(recorded)["error"]
        == "rank 0 of 2 has ended without a word, as a process does that is killed; rank 1:"
        f" Connection closed by peer\nlog: {recorded.stderr(0, 0)}"
    )


def test_what_has_an_end_keeps_it_and_so_does_what_goes_on(recorded: RunPaths) -> None:
    with at_work(recorded):  # the next attempt
        last_word.write_end(recorded.folder, 0)
        assert read_result(recorded)["status"] == "running"
    create_result(recorded, may_exist=True, status=COMPLETED)
    last_word.write_end(recorded.folder, 0)
    assert read_result(recorded)["status"] == "completed"


def test_who_ends_in_order_has_no_need_of_it(recorded: RunPaths) -> None:
    with last_word.kept(recorded.folder, 0):
        pass
    assert read_result(recorded)["status"] == "running"


ABORTS = """
import faulthandler, os, sys
from pathlib import Path
from expt.launch import last_word
faulthandler.enable(open(sys.argv[2], "w"))
with last_word.kept(Path(sys.argv[1]), 0):
    os.abort()
"""


def test_whoever_aborts_is_outlived_by_its_last_word(recorded: RunPaths) -> None:
    words = (str(recorded.folder), str(recorded.stderr(0, 0)))
    done = subprocess.run([sys.executable, "-c", ABORTS, *words], env=environment(), check=False)
    assert done.returncode == -signal.SIGABRT
    wait_until(lambda: read_result(recorded)["status"] != "running", timeout_s=30)
    assert read_result(recorded)["error"].startswith("rank 0 of 2 was killed by SIGABRT\n")


TORCHRUN = [
    sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m",
    "expt",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_abort_under_torchrun_is_recorded(victim: int, tmp_path: Path) -> None:
    """As NCCL's watchdog has it abort, in C: here by a fault on purpose, on a CPU."""
    words = ("epochs=1000", "hydra.run.dir=here", "threads=1", "max_restarts=0")
    env = environment(**{VARIABLE: f"{victim}:5:abort"})
    done = subprocess.run(
        [*TORCHRUN, *words], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240
    )
    assert done.returncode != 0
    paths = RunPaths(tmp_path / "here")
    wait_until(lambda: json.loads(paths.result.read_text())["status"] != "running", timeout_s=20)
    record = read_result(paths)
    assert record["status"] == "failed"
    assert f"rank {victim} of 2 was killed by SIGABRT" in record["error"] or (
        victim
        and "has lost the other workers"
        in record["error"]  # where rank 0 has noticed before torchrun ended it
    )


def test_an_error_of_its_own_comes_before_an_end_without_a_trace(recorded: RunPaths) -> None:
    """Torchrun kills the others of a rank that has failed, if they wait for it too long."""
    lost = DeviceLost(gpus={"1": "GPU 1 (uuid): busy"})
    leave_error(recorded, 1, lost, 10)
    last_word.write_end(recorded.folder, 0)
    found = read_result(recorded)
    assert found["error"].startswith("rank 1 of 2: GPU 1 (uuid): busy\nlog: ")
    assert found["error_kind"] == "DeviceLost"


@pytest.mark.slow
def test_a_refusal_is_printed_before_torchrun_hears_of_it(tmp_path: Path) -> None:
    """It ends all ranks once one has ended; only rank 0 has something to say."""
    done = subprocess.run(
        [*TORCHRUN, "-m", "seed=0,1"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 1
    assert done.stderr.count("error: -m: a sweep cannot run inside torchrun") == 1
