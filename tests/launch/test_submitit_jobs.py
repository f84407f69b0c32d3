"""Jobs of a cluster, with a queue that is none."""

import contextlib
import dataclasses
import pickle
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from expt.config import secrets
from expt.errors import ConfigError, DeviceLost, Diverged, Interrupted, OutOfMemory, RunFailed
from expt.launch import submitit_jobs
from expt.launch.job import Job, Observer
from expt.launch.submitit_jobs import ClusterJob, Queue, executor_of, outcome
from expt.machine import Machine
from expt.runs.request import received
from expt.runs.result import COMPLETED, INTERRUPTED, RUNNING, create_result, update_result
from expt.signals import Heeded
from tests.facade import Patch, request


class Submitted:
    """A job of submitit's that has ended, having said what `outcome` holds."""

    def __init__(self, outcome: dict[str, Any], job: ClusterJob) -> None:
        self.job, self.job_id, self.num_tasks = job, "4711", 1
        self.paths = SimpleNamespace(stderr="queue.err", result_pickle=Path("4711_0_result.pkl"))
        if outcome:
            create_result(received(job.sent, Machine(cpus=8), typed_at=1.0).paths, **outcome)

    def task(self, _: int) -> "Submitted":
        return self

    def done(self) -> bool:
        return True

    def exception(self) -> Exception | None:
        return RuntimeError("Traceback\nslurmstepd: out of memory\n")


class Executor:
    """Keeps what is submitted, a batch at a time."""

    def __init__(self, *outcomes: dict[str, Any], cluster: str = "local") -> None:
        self.outcomes, self.batches = list(outcomes), list[list[Submitted]]()
        self.cluster, self.parameters = cluster, list[dict[str, str]]()

    def update_parameters(self, **parameters: str) -> None:
        self.parameters.append(parameters)

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        self.batches.append([])
        yield

    def submit(self, job: ClusterJob) -> Submitted:
        submitted = Submitted(self.outcomes.pop(0), pickle.loads(pickle.dumps(job)))
        self.batches[-1].append(submitted)
        return submitted


@pytest.fixture(autouse=True)
def _on_one_machine(monkeypatch: Patch) -> None:
    monkeypatch.setattr(submitit_jobs, "RESULT_S", 0.0)


def jobs(folder: Path, count: int) -> list[Job]:
    asked = [request(folder / str(number), may_have_run=True) for number in range(count)]
    return [Job(one.paths, one) for one in asked]


KILLED = "job 4711: slurmstepd: out of memory\nlog: queue.err"
OUTCOMES: dict[str, tuple[dict[str, Any], str, str | None]] = {
    "completed": ({"status": "completed"}, "completed", None),
    "pruned": ({"status": "pruned", "epoch_s": [1.0, 1.0]}, "pruned", None),
    "pruned before": ({"status": "pruned", "epoch_s": [1.0]}, "failed", KILLED),
    "failed": ({"status": "failed", "error": "rank 0 raised"}, "failed", "rank 0 raised"),
    "interrupted": ({"status": "interrupted", "error": "asked"}, "interrupted", "asked"),
    "without a word": ({"status": "interrupted"}, "interrupted", "interrupted, and saved"),
    "killed": ({"status": "running"}, "failed", KILLED),
    "before it began": ({}, "failed", KILLED),
}


@pytest.mark.parametrize("name", OUTCOMES)
def test_a_jobs_outcome(tmp_path: Path, name: str) -> None:
    outcome, status, error = OUTCOMES[name]
    (job,) = jobs(tmp_path, 1)
    job.continue_until(until_epoch=2)
    Queue(Executor(outcome), Observer()).run(iter([job]))
    assert (job.status, None if job.error is None else str(job.error)) == (status, error)


@pytest.mark.parametrize("kind", [DeviceLost, Diverged, OutOfMemory, RunFailed])
def test_failure_has_the_recorded_kind(tmp_path: Path, kind: type[RunFailed]) -> None:
    """Of a search the first two are bad points, and no failures."""
    (job,) = jobs(tmp_path, 1)
    Queue(
        Executor({"status": "failed", "error": "x", "error_kind": kind.__name__}), Observer()
    ).run(iter([job]))
    assert type(job.error) is kind


LOST = {"status": "failed", "error": "GPU 0: it is dead\nlog: x", "error_kind": "DeviceLost"}


def test_a_job_whose_gpu_is_dead_is_submitted_for_another_node(tmp_path: Path) -> None:
    (job,) = jobs(tmp_path, 1)
    executor = Executor({**LOST, "node": "n1"}, {"status": "completed"}, cluster="slurm")
    Queue(executor, Observer(), "n7,n8").run(iter([job]))
    assert job.status == COMPLETED
    assert executor.parameters == [{"slurm_exclude": "n7,n8,n1"}]


@pytest.mark.parametrize(("cluster", "times"), [("slurm", 4), ("local", 1)])
def test_a_job_is_not_submitted_for_ever(tmp_path: Path, cluster: str, times: int) -> None:
    (job,) = jobs(tmp_path, 1)
    executor = Executor(*({**LOST, "node": f"n{at}"} for at in range(times)), cluster=cluster)
    Queue(executor, Observer()).run(iter([job]))
    assert (type(job.error), len(executor.batches)) == (DeviceLost, times)


@pytest.mark.parametrize("tasks", [1, 3])
def test_killed_job_is_not_waited_for(tmp_path: Path, tasks: int, monkeypatch: Patch) -> None:
    """By itself it waits 15 s for each task's file."""
    local = pytest.importorskip("submitit.local.local", reason="needs expt[slurm]")
    monkeypatch.setattr(local.LocalJob, "_results_timeout_s", 10**6)
    submitted = local.LocalJob(tmp_path, "4711", range(tasks))
    submitted.paths.folder.mkdir(exist_ok=True)
    submitted.task(0).paths.stderr.write_text("a traceback\nKilled\n")
    error = outcome(jobs(tmp_path, 1)[0], submitted)
    assert str(error) == f"job 4711: Killed\nlog: {submitted.paths.stderr}"


def test_a_sweep_is_one_batch_of_what_is_left_to_do(tmp_path: Path) -> None:
    done, refused, *left = jobs(tmp_path, 4)
    done.status, refused.error = "completed", ConfigError("lr=x")
    executor = Executor({"status": "completed"}, {"status": "completed"})
    Queue(executor, Observer()).run(iter([done, refused, *left]))
    assert [len(batch) for batch in executor.batches] == [2]
    assert {job.status for job in (done, *left)} == {"completed"}
    assert (refused.status, refused.refused) == ("failed", True)


def test_pickled_request_holds_no_secret(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("EXPT_TEST_ROOT", "/home/very-secret")
    monkeypatch.setattr(secrets, "_texts", {})
    secrets.remember({"dataset.root": "${oc.env:EXPT_TEST_ROOT}"})
    asked = request(tmp_path / "a", may_have_run=True)
    settings = {**asked.settings, "dataset": {**asked.settings["dataset"], "train_limit": 7}}
    env = {"DATA": "/home/very-secret/data"}
    with_secret = dataclasses.replace(asked, settings=settings, env=env)
    pickled = pickle.dumps(ClusterJob(with_secret.to_send(), ["expt", "-m"]))
    assert b"very-secret" not in pickled
    there = received(pickle.loads(pickled).sent, Machine(cpus=8), typed_at=5.0)
    assert there.paths == with_secret.paths
    assert there.about == with_secret.about
    assert there.env == with_secret.env
    assert (there.typed_at, there.may_have_run, there.config.dataset.train_limit) == (5.0, True, 7)


@pytest.mark.parametrize(("by", "called"), [(signal.SIGUSR2, True), (signal.SIGTERM, False)])
def test_a_job_that_has_to_make_room_goes_back_into_the_queue(
    by: signal.Signals, called: bool, tmp_path: Path, monkeypatch: Patch
) -> None:
    calls = []

    def train(_: ClusterJob, __: float) -> None:
        with Heeded():
            signal.raise_signal(by)
            raise Interrupted("asked")

    monkeypatch.setattr(ClusterJob, "_train", train)
    monkeypatch.setattr("sys.argv", ["python"])
    before = signal.signal(
        signal.SIGUSR2, lambda number, frame: calls.append((number, frame))
    )  # submitit's
    try:
        with pytest.raises(Interrupted):
            ClusterJob(request(tmp_path).to_send(), ["expt", "-m"])()
    finally:
        signal.signal(signal.SIGUSR2, before)
        with Heeded():  # forgets
            pass
    assert calls == ([(signal.SIGUSR2, None)] if called else [])
    assert sys.argv == ["expt", "-m"]


def test_without_slurm_there_is_no_queue_to_submit_to(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    options = {"executor": "slurm", "submitit_folder": "jobs", "max_num_timeout": 3}
    with pytest.raises(ConfigError, match="hydra/launcher=submitit_slurm: "):
        executor_of(options, 1)


class Running:
    """Runs for so many looks; if it is cancelled before, it saves, if it has begun."""

    job_id, num_tasks = "4711", 1

    def __init__(self, job: ClusterJob, looks: int, *, begins: bool) -> None:
        self._looks = looks
        self.paths = SimpleNamespace(stderr="queue.err", result_pickle=Path("4711_0_result.pkl"))
        self.run, self.cancelled = received(job.sent, Machine(cpus=8), typed_at=1.0).paths, 0
        if begins:
            create_result(self.run, may_exist=True, status=RUNNING)

    def done(self) -> bool:
        self._looks -= 1
        if self._looks < 0 and not self.cancelled:
            create_result(self.run, may_exist=True, status=COMPLETED)
        return self._looks < 0

    def cancel(self, check: bool = True) -> None:
        self.cancelled, self._looks = self.cancelled + 1, 0
        if self.run.result.exists():
            update_result(self.run, status=INTERRUPTED)

    def task(self, _: int) -> "Running":
        return self

    def exception(self) -> Exception | None:
        assert not self.cancelled, "submitit waits 15 s for what it says"
        return None


class Silent(Running):
    """Ends without a word, or one that has not come yet from another node."""

    def done(self) -> bool:
        self._looks -= 1
        return self._looks < 0


class Cluster:
    """Starts jobs that run for so many looks."""

    def __init__(self, *plans: tuple[int, bool], kind: type[Running] = Running) -> None:
        self.plans, self.submitted, self._kind = list(plans), list[Running](), kind

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        yield

    def submit(self, job: ClusterJob) -> Running:
        looks, begins = self.plans.pop(0)
        self.submitted.append(self._kind(job, looks, begins=begins))
        return self.submitted[-1]


LONG, WAITS = (50, True), (50, False)


@pytest.fixture
def _at_once(monkeypatch: Patch) -> None:
    monkeypatch.setattr(submitit_jobs, "POLL_S", 0.0)


@pytest.mark.usefixtures("_at_once")
def test_to_finish_cancels_what_runs_or_waits_and_is_no_interruption(tmp_path: Path) -> None:
    some = jobs(tmp_path, 2)

    class Budget(Observer):
        def tick(self, active: Sequence[Job]) -> None:
            queue.finish("the budget is used up")

    queue = Queue(cluster := Cluster(LONG, WAITS), Budget())
    queue.run(iter(some))
    assert [each.cancelled for each in cluster.submitted] == [1, 1]
    assert [str(job.error) for job in some] == ["the budget is used up"] * 2
    assert [job.status for job in some] == [INTERRUPTED, INTERRUPTED]
    queue.run(iter(late := jobs(tmp_path / "later", 1)))
    assert [job.status for job in late] == ["queued"], "nothing is submitted after that"


@pytest.mark.usefixtures("_at_once")
def test_silent_job_does_not_hold_up_others(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(submitit_jobs, "RESULT_S", 60.0)
    late, other = jobs(tmp_path, 2)
    looks = list[str]()

    class Looks(Observer):
        def tick(self, active: Sequence[Job]) -> None:
            looks.append(other.status)
            for job in (other, late) if len(looks) == 6 else ():
                create_result(job.paths, may_exist=True, status=COMPLETED)

    Queue(Cluster((0, True), (3, True), kind=Silent), Looks()).run(iter([late, other]))
    assert (late.status, other.status) == (COMPLETED, COMPLETED)
