"""Two hosts, as network namespaces joined by a cable: torchrun on both trains one run."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from expt.runs import checkpoint_file
from tests.conftest import Trained
from tests.facade import RunFolder, alive, as_typed, descendants, environment
from tests.faults.running import wait_until
from tests.integration.test_resume import assert_equal

pytestmark = pytest.mark.slow
PORT = 29400
LIMIT_S = 180
SETTINGS = ("model.dropout=0.3", "epochs=4", "threads=1", "log_every=5", "checkpoint.every_steps=7")


class Hosts:
    """The hosts a and b, each with a name, an address and torchrun."""

    def __init__(self, tag: str, folder: Path) -> None:
        self.names = {name: f"expt{tag}{name}" for name in "ab"}
        self.folder = folder
        (folder / "own").mkdir()
        self.started: list[subprocess.Popen[str]] = []

    def connect(self) -> None:
        a, b = self.names.values()
        for space in (a, b):
            etc = Path("/etc/netns") / space  # what `ip netns exec` shows there as /etc
            etc.mkdir(parents=True)
            (etc / "hosts").write_text(f"127.0.0.1 localhost\n10.201.0.1 {a}\n10.201.0.2 {b}\n")
            _ip(f"netns add {space}")
            _ip(f"-n {space} link set lo up")
        _ip(f"link add cable netns {a} type veth peer name cable netns {b}")
        for number, space in enumerate((a, b), 1):
            _ip(f"-n {space} address add 10.201.0.{number}/24 dev cable")
            _ip(f"-n {space} link set cable up")
            # TCP gives up after 3 s instead of 15 min: torchrun itself waits for its rendezvous as
            # long as that.
            retries = ["sh", "-c", "echo 3 > /proc/sys/net/ipv4/tcp_retries2"]
            subprocess.run(["ip", "netns", "exec", space, *retries], check=True)

    def disconnect(self) -> None:
        for process in self.started:
            for pid in alive(descendants(process.pid) | {process.pid}):
                os.kill(pid, 9)
            process.communicate()
        for space in self.names.values():
            subprocess.run(["ip", "netns", "delete", space], capture_output=True, check=False)
            shutil.rmtree(Path("/etc/netns") / space, ignore_errors=True)

    def cut(self) -> None:
        _ip(f"-n {self.names['a']} link set cable down")

    def torchrun(
        self, name: str, *arguments: str, workers: int = 2, options: tuple[str, ...] = ()
    ) -> subprocess.Popen[str]:
        """Start torchrun on host `name` in a shared folder, of which b has its own `own`."""
        space = self.names[name]
        nodes = "" if "--nnodes" in options else "--nnodes 2"
        own_disk = "mount -t tmpfs none own && " if name == "b" else ""
        command = (
            *as_typed(f"ip netns exec {space} unshare --uts --mount sh -c"),
            *(f'{own_disk}hostname "$0" && exec "$@"', space, sys.executable),
            *as_typed(f"-m torch.distributed.run {nodes} --nproc-per-node {workers}"),
            *as_typed(f"--rdzv-backend c10d --rdzv-endpoint {self.names['a']}:{PORT}"),
            *options,
            *("-m", "expt", *arguments),
        )
        pipes: Any = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
        process = subprocess.Popen(command, cwd=self.folder, env=environment(), text=True, **pipes)
        self.started.append(process)
        return process

    def run(
        self, *arguments: str, options: tuple[str, ...] = ()
    ) -> dict[str, subprocess.CompletedProcess[str]]:
        """torchrun on both, to the end."""
        processes = {name: self.torchrun(name, *arguments, options=options) for name in self.names}
        return {name: _ended(process) for name, process in processes.items()}


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True, text=True)


def _ended(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    out, err = process.communicate(timeout=LIMIT_S)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("needs root, and the commands ip and unshare, to make network namespaces")
    both = Hosts(f"{os.getpid():x}", tmp_path_factory.mktemp("hosts"))
    try:
        try:
            both.connect()
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(
                f"network namespaces are not permitted here: {getattr(error, 'stderr', error)}"
            )
        yield both
    finally:
        both.disconnect()


MORTAL = """
import os, pathlib, signal
from expt.models.vision import MLP
class Net(MLP):
    steps = 0
    def forward(self, images):
        Net.steps += self.training
        mark = pathlib.Path('killed')
        if Net.steps == 50 and os.environ['RANK'] == '3' and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(images)
"""
OWN = ("+model._target_=mortal.Net", "~model.hidden", *SETTINGS)


def _local(trained: Trained) -> RunFolder:
    """Train the same run with four workers of this machine, with gloo as on two hosts."""
    return trained(*SETTINGS, "world_size=4", "ddp.shared_memory=false", name="local")


def _killed_once(hosts: Hosts, name: str, *settings: str) -> RunFolder:
    """A run on both hosts, in folder `name`, of which a worker on host b is killed."""
    (hosts.folder / "mortal.py").write_text(MORTAL)
    (hosts.folder / "killed").unlink(missing_ok=True)
    for host, done in hosts.run(
        *OWN, *settings, f"hydra.run.dir='{name}'", options=("--max-restarts", "2")
    ).items():
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("run folder") == (host == "a")
    restarted = RunFolder(hosts.folder / name)
    assert (restarted.result["status"], restarted.result["attempts"]) == ("completed", 2)
    assert restarted.result["resumed_from"]["step"] in (35, 40, 42, 49)
    return restarted


def test_a_worker_killed_on_one_host_starts_both_again(hosts: Hosts, trained: Trained) -> None:
    run, (a, b) = _killed_once(hosts, "shared"), hosts.names.values()
    assert [run.result[key] for key in ("world_size", "local_world_size", "node")] == [4, 2, a]
    assert run.result["hosts"] == [{"name": a, "ranks": [0, 1]}, {"name": b, "ranks": [2, 3]}]
    assert not (hosts.folder / "outputs").exists(), "one folder"
    for attempt in "01":
        assert {path.name for path in (run.folder / "logs" / attempt).iterdir()} == set("0123")
    assert_equal(run, _local(trained))
    as_usual = trained(*SETTINGS, "world_size=4", name="local, in shared memory")
    for tag in ("running/loss", "loss/train", "loss/val", "loss/test"):
        points, others = run.curve(tag), as_usual.curve(tag)
        assert len(points) == len(others) > 0
        for mine, other in zip(points, others, strict=True):
            assert mine == pytest.approx(other, abs=1e-4)


SHARDED = ("optimizer=adamw", "optimizer.lr=0.001", "ema=0.9")


@pytest.mark.parametrize(
    "words",
    [
        ("strategy=fsdp",),
        ("strategy=fsdp", "checkpoint.sharded=true"),
        ("strategy=hsdp", "checkpoint.sharded=true"),
    ],
    ids=["one file", "parts", "replicas, parts"],
)
def test_sharded_two_hosts_resume(words: tuple[str, ...], hosts: Hosts, trained: Trained) -> None:
    settings = (*SHARDED, *words)
    restarted = _killed_once(hosts, "-".join(words).replace("=", " "), *settings)
    of_this_machine = ("sharding.shards=2",) if "hsdp" in words[0] else ()  # as `auto` is there
    whole = trained(*SETTINGS, *settings, *of_this_machine, "world_size=4", name="local")
    assert_equal(restarted, whole)
    last = restarted.paths.last
    checkpoint_file.check(last)
    assert bool(checkpoint_file.read(last).get("parts")) == ("checkpoint.sharded=true" in words)


def test_checkpoints_on_a_disk_that_one_host_alone_sees(hosts: Hosts, trained: Trained) -> None:
    restarted = _killed_once(hosts, "own/run")
    for attempt in "01":
        assert {path.name for path in (restarted.folder / "logs" / attempt).iterdir()} == {"0", "1"}
    assert_equal(restarted, _local(trained))


def test_lost_host_leaves_the_global_batch(hosts: Hosts, trained: Trained) -> None:
    settings = as_typed("epochs=40 threads=1 log_every=20 checkpoint.every_steps=20 timeout_s=5")
    # else torchrun waits for half a minute for more hosts
    soon = "last_call_timeout=3,keep_alive_interval=1"
    elastic = ("--nnodes", "1:2", "--max-restarts", "2", "--rdzv-conf", soon)
    words = (*settings, "hydra.run.dir=elastic")
    a, b = (hosts.torchrun(name, *words, workers=1, options=elastic) for name in "ab")
    metrics = hosts.folder / "elastic/metrics.jsonl"
    wait_until(lambda: metrics.exists() and '"step": 100,' in metrics.read_text())
    for pid in alive(descendants(b.pid) | {b.pid}):
        os.kill(pid, 9)
    done = _ended(a)
    assert done.returncode == 0, done.stderr
    found, local = RunFolder(hosts.folder / "elastic"), trained(*settings)
    assert (found.result["world_size"], found.result["attempts"]) == (1, 2)
    assert found.result["steps"] == local.result["steps"]
    curves = (run.curve("running/loss") for run in (found, local))
    for mine, other in zip(*curves, strict=True):
        assert mine == pytest.approx(other, abs=1e-4)


def test_a_cut_cable_ends_both_sides(hosts: Hosts) -> None:
    long = as_typed("epochs=100000 log_every=1 threads=1 timeout_s=3 hydra.run.dir=cut")
    impatient = ("--rdzv-conf", "read_timeout=3")  # of torchrun itself; its default is 60 s
    both = [hosts.torchrun(name, *long, workers=1, options=impatient) for name in hosts.names]
    metrics = hosts.folder / "cut/metrics.jsonl"
    wait_until(lambda: metrics.exists() and '"step": 20,' in metrics.read_text())
    started = {pid for process in both for pid in descendants(process.pid)}
    hosts.cut()
    for process in both:
        done = _ended(process)
        assert done.returncode == 1
        assert "has lost the other workers: one has died, or the network is cut" in done.stderr
    assert not alive(started)
    assert RunFolder(hosts.folder / "cut").result["status"] == "failed"
