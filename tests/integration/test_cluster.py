"""Runs as jobs of submitit and of a real Slurm, whose two nodes are this machine."""

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import expt
from expt.runs.found import results
from expt.runs.result import COMPLETED, INTERRUPTED, read_result
from tests.conftest import Trained, Typed
from tests.facade import Patch, RunFolder, environment, run, start
from tests.faults.running import wait_until

SBATCH = Path(__file__).parents[2] / "scripts/slurm.sbatch"
LIMIT_S = 45
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=1
KillWait=10
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 State=UNKNOWN
PartitionName=main Nodes=n1,n2 Default=YES State=UP
"""


class Slurm:
    """A cluster of two nodes, both on this machine."""

    def __init__(self, folder: Path) -> None:
        self._conf, self._daemons = folder / "slurm.conf", list[subprocess.Popen[bytes]]()
        # Its nodes' names mean nothing to the resolver here.
        self.env = {"SLURM_CONF": str(self._conf), "MASTER_ADDR": "127.0.0.1"}
        (folder / "state").mkdir()
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
        ports = [listener.getsockname()[1] for listener in sockets]
        for listener in sockets:
            listener.close()
        self._conf.write_text(CONF.format(host=socket.gethostname(), folder=folder, ports=ports))

    def start(self) -> None:
        for command in (
            ["slurmctld", "-D", "-c"],
            ["slurmd", "-D", "-N", "n1"],
            ["slurmd", "-D", "-N", "n2"],
        ):
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            self._daemons.append(subprocess.Popen(command, env=environment(**self.env), **quiet))  # type: ignore[call-overload]
        wait_until(lambda: self.ask("sinfo", "-h", "-o", "%T").split() == ["idle"], timeout_s=20)

    def stop(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.terminate()
            daemon.wait(20)

    def ask(self, *command: str, cwd: Path | None = None) -> str:
        how: Any = {"cwd": cwd, "env": environment(**self.env), "capture_output": True}
        return str(subprocess.run(command, text=True, check=False, **how).stdout).strip()

    def jobs(self) -> list[str]:
        return sorted(self.ask("squeue", "-h", "-r", "-o", "%i").split())

    def preempt(self, job: str, signal_name: str) -> None:
        """Ask `job` to go, and shorten the two minutes that Slurm delays a requeued job."""
        self.ask("scancel", f"--signal={signal_name}", job)
        wait_until(lambda: self._state(job) == "PENDING", timeout_s=LIMIT_S)
        # Slurm kills what it starts within the second in which it took the job from its nodes.
        self.ask("scontrol", "update", f"job={job}", "StartTime=now+2")
        wait_until(lambda: self._state(job) == "RUNNING", timeout_s=LIMIT_S)

    def _state(self, job: str) -> str:
        return self.ask("squeue", "-h", "-j", job, "-o", "%T")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if os.geteuid() != 0 or not shutil.which("slurmctld") or not shutil.which("slurmd"):
        pytest.skip("needs root, and Debian's packages slurmctld, slurmd and slurm-client")
    cluster = Slurm(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def _has_come_to(folder: Path, step: int) -> bool:
    return any(f'"step": {step},' in path.read_text() for path in folder.rglob("metrics.jsonl"))


@pytest.mark.slow
def test_jobs_of_submitit_give_the_numbers_of_the_pool(tmp_path: Path) -> None:
    pytest.importorskip("submitit", reason="needs expt[slurm]")
    grid = ("model=mlp,convnet", "epochs=2", "model.dropout=0.2", "world_size=1")
    jobs, pool = tmp_path / "jobs", tmp_path / "pool"
    command = ("-m", "hydra/launcher=submitit_local", *grid, f"hydra.sweep.dir={jobs}")
    done = run(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "accuracy/val" in done.stdout
    results = expt.sweep(*grid, f"hydra.sweep.dir={pool}")
    assert len(results) == 2
    for result in results:
        assert RunFolder(jobs / result.folder.name).points == RunFolder(result.folder).points
        assert RunFolder(jobs / result.folder.name).result["identity"] == result.record["identity"]


def test_a_wrong_key_is_refused_before_anything_is_submitted(
    tmp_path: Path, typed: Typed, monkeypatch: Patch
) -> None:
    pytest.importorskip("submitit", reason="needs expt[slurm]")
    monkeypatch.chdir(tmp_path)
    done = typed("-m", "hydra/launcher=submitit_local", "hydra.launcher.nodes=2", "seed=0,1")
    assert done.returncode == 2
    assert "hydra.launcher.nodes=2: needs gpus_per_node" in done.stderr
    assert not list((tmp_path / "outputs/sweeps").glob("*"))


@pytest.mark.slow
def test_a_preempted_job_of_a_sweep_goes_on(slurm: Slurm, tmp_path: Path, trained: Trained) -> None:
    pytest.importorskip("submitit", reason="needs expt[slurm]")
    settings = ("model.dropout=0.3", "threads=1", "log_every=20", "world_size=1")
    grid = (*settings, "epochs=300,2", f"hydra.sweep.dir={tmp_path}/jobs")
    process = start("-m", "hydra/launcher=submitit_slurm", *grid, cwd=tmp_path, **slurm.env)
    long, short = (RunFolder(tmp_path / "jobs" / f"epochs={epochs}") for epochs in (300, 2))
    wait_until(lambda: _has_come_to(long.folder, 100), timeout_s=LIMIT_S)
    job = slurm.jobs()[0]
    assert job.endswith("_0")  # of an array
    slurm.preempt(job, "USR2")
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, out + err
    assert (long.result["status"], long.result["attempts"]) == ("completed", 2)
    assert (short.result["status"], short.result["attempts"]) == ("completed", 1)
    assert long.result["resumed_from"]["step"] >= 100
    assert long.points == trained(*settings, "epochs=300").points


@pytest.mark.slow
def test_cancelled_job_of_a_search_can_be_resumed(slurm: Slurm, tmp_path: Path) -> None:
    """By `scancel`, as a person or an administrator does; the same command goes on with it."""
    pytest.importorskip("submitit", reason="needs expt[slurm]")
    search = ("search=random", "search.runs=3", "search.batch=2", "optimizer.lr=interval(0.01,0.1)")
    settings = ("model.dropout=0.3", "threads=1", "log_every=20", "world_size=1", "epochs=300")
    words = ("-m", "hydra/launcher=submitit_slurm", *search, *settings, "hydra.sweep.dir=jobs")
    process = start(*words, cwd=tmp_path, **slurm.env)
    wait_until(lambda: _has_come_to(tmp_path, 100), timeout_s=LIMIT_S)
    runs = {found.number: found.paths for found in results(tmp_path / "jobs")}
    cancelled = next(number for number, paths in runs.items() if _has_come_to(paths.folder, 100))
    slurm.ask("scancel", next(job for job in slurm.jobs() if job.endswith(f"_{cancelled}")))
    out, err = process.communicate(timeout=3 * LIMIT_S)
    records = {found.number: found.record for found in results(tmp_path / "jobs")}
    expected = {number: INTERRUPTED if number == cancelled else COMPLETED for number in range(3)}
    assert {number: record["status"] for number, record in records.items()} == expected, out + err
    again = run(*words, cwd=tmp_path, **slurm.env)
    assert again.returncode == 0, again.stderr
    record = read_result(runs[cancelled])
    assert (record["status"], record["attempts"]) == (COMPLETED, 2)
    assert record["resumed_from"]["step"] >= 100


@pytest.mark.slow
def test_template_trains_on_two_nodes(slurm: Slurm, tmp_path: Path, trained: Trained) -> None:
    settings = ("epochs=100", "threads=1", "log_every=20")
    (tmp_path / "job").write_text(SBATCH.read_text().replace("#SBATCH --gpus-per-node=4\n", ""))
    size = ("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1")
    slurm.ask("sbatch", *size, "job", *settings, cwd=tmp_path)
    wait_until(lambda: _has_come_to(tmp_path, 60), timeout_s=LIMIT_S)
    (job,) = slurm.jobs()
    slurm.preempt(job, "USR1")
    folder = tmp_path / "outputs/slurm" / job
    wait_until(lambda: not slurm.jobs(), timeout_s=LIMIT_S)
    log = (tmp_path / f"slurm-{job}.out").read_text()
    result = RunFolder(folder).result
    assert (result["status"], result["attempts"]) == ("completed", 2), log
    assert [host["ranks"] for host in result["hosts"]] == [[0], [1]]
    assert "interrupted; to continue" in log
    local = trained(*settings, "world_size=2")
    assert RunFolder(folder).result["metrics"]["loss/test"] == pytest.approx(
        local.result["metrics"]["loss/test"], abs=1e-5
    )
