"""The rendezvous of workers that another launcher has started, with workers in threads."""

import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from expt import machine
from expt.errors import ConfigError, RunFailed
from expt.launch import torchrun
from expt.launch.torchrun import ROUND, Answer, Arrival, Rendezvous, hosts, interface_towards
from expt.machine import Machine
from expt.runs.paths import RunPaths
from tests.facade import Capture, Patch, request


@pytest.fixture
def store() -> dist.HashStore:
    return dist.HashStore()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def listening(
    threads: ThreadPoolExecutor, store: dist.Store, rank: int, size: int = 2
) -> Future[dict[str, Any]]:
    meeting = Rendezvous(store, rank=rank, world_size=size, arrive_s=20)
    return threads.submit(meeting.listen)


@pytest.mark.parametrize(
    ("world_size", "rest"), [(12, " and 3 more"), (10, " and 1 more"), (9, "")]
)
def test_who_does_not_arrive_is_named(world_size: int, rest: str, store: dist.HashStore) -> None:
    named = f"rank 1, 2, 3, 4, 5, 6, 7, 8{rest} of {world_size} did not arrive within 0.01 s"
    with pytest.raises(RunFailed, match=named):
        Rendezvous(store, rank=0, world_size=world_size, arrive_s=0.01).gather()


def test_a_rank_0_that_does_not_arrive_is_named(store: dist.HashStore) -> None:
    with pytest.raises(RunFailed, match=r"rank 0 of 2 did not arrive within 0\.05 s"):
        Rendezvous(store, rank=1, world_size=2, arrive_s=0.05).listen()


def test_the_word_of_a_stale_round_is_not_believed(store: dist.HashStore) -> None:
    """The store has outlived a rank 0 that died after it had told; its round still stands there."""
    dead = Rendezvous(store, rank=0, world_size=2)
    dead.tell(
        [Arrival(0, "a", 0, ""), Arrival(1, "b", 0, "a token of then")],
        {},
        begins="/runs/a",
    )
    with pytest.raises(RunFailed, match="did not arrive"):
        Rendezvous(store, rank=1, world_size=2, arrive_s=0.05).listen()


def test_worker_leaves_a_stale_round(store: dist.HashStore, threads: ThreadPoolExecutor) -> None:
    dead = Rendezvous(store, rank=0, world_size=2)
    dead.tell([], {}, begins="/runs/old")
    other = listening(threads, store, 1)
    first = Rendezvous(store, rank=0, world_size=2, arrive_s=20)
    assert first.earlier() == "/runs/old"
    first.tell(first.gather(), {"folder": "/runs/new"})
    assert other.result(20)["folder"] == "/runs/new"


def test_a_refusal_leaves_no_folder_behind(store: dist.HashStore) -> None:
    first = Rendezvous(store, rank=0, world_size=1)
    assert first.earlier() is None
    first.tell(first.gather(), {"folder": "/runs/refused"})
    first.tell(first.gather(), {"refused": 2})
    assert first.earlier() is None


def test_each_round_has_a_store_of_its_own_for_the_group(store: dist.HashStore) -> None:
    one = Rendezvous(store, rank=0, world_size=1)
    one.store.set("address", "of then")
    two = Rendezvous(store, rank=0, world_size=1)
    assert not two.store.check(["address"])
    assert store.get(ROUND).decode() in json.dumps(vars(two), default=str)


def test_hosts_are_nodes_and_their_ranks() -> None:
    arrivals = [Arrival(rank, "ab"[rank > 1], int(rank > 1), "") for rank in (2, 0, 3, 1)]
    assert hosts(arrivals) == [{"name": "a", "ranks": [0, 1]}, {"name": "b", "ranks": [2, 3]}]
    assert len(hosts([Arrival(0, "a", 0, ""), Arrival(1, "a", 1, "")])) == 2, "of one name"


ROUTES = """Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT
eth0 00000000 0102000A 0003 0 0 100 00000000 0 0 0
wlan0 00000000 010210AC 0003 0 0 600 00000000 0 0 0
ib0 0000010A 00000000 0001 0 0 0 0000FFFF 0 0 0
"""


@pytest.mark.skipif(sys.byteorder == "big", reason="the table is written in the machine's order")
def test_interface_leads_to_other_machines(tmp_path: Path, monkeypatch: Patch) -> None:
    """A machine's own name may stand for its loopback, by which no other reaches it."""
    (table := tmp_path / "route").write_text(ROUTES)
    monkeypatch.setattr(torchrun, "ROUTES", table)
    found = [interface_towards(address) for address in ("10.1.7.7", "127.0.1.1", "9.9.9.9")]
    assert found == ["ib0", "eth0", "eth0"]
    assert interface_towards("no address") is None
    for strange in ("Iface\n", "Iface\neth0 00000000\n", "Iface\neth0 a b c d e f g h i\n"):
        table.write_text(strange)
        assert interface_towards("127.0.1.1") is None
    assert interface_towards(f"{'a' * 64}.example") is None, "a name that can't be encoded"


FIRST, SECOND = ("0", "GPU-a"), ("1", "GPU-b")


@pytest.mark.parametrize(
    ("gpus", "local_rank", "used"),
    [(2, "0", ["0"]), (2, "1", ["1"]), ((1, 0), "0", ["1"]), (1, "1", ["0"]), (0, "1", [])],
)
def test_a_worker_uses_the_gpu_of_its_place_on_its_node(
    gpus: Any, local_rank: str, used: list[str], tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(machine, "detect", lambda: Machine(gpus=("0", "1")))
    monkeypatch.setattr(torchrun, "gpu_uuid", lambda gpu: f"GPU-{gpu}")
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    config = request(tmp_path, gpus=gpus, world_size=2).config
    assert torchrun._use(config) == Answer(2, [(gpu, f"GPU-{gpu}") for gpu in used])


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([Answer(2, [FIRST]), Answer(2, [SECOND])], ("0", "1")),
        ([Answer(1, [FIRST]), Answer(1, [("0", "GPU-b")])], ("GPU-a", "GPU-b")),  # Slurm's tasks
        ([Answer(1), Answer(0)], ()),
    ],
)
def test_the_record_names_the_gpus_of_all_workers(
    tmp_path: Path, answers: list[Answer], expected: tuple[str, ...]
) -> None:
    config = request(tmp_path, world_size=2, backend="nccl").config
    assert torchrun._gpus(answers, config) == expected


def test_two_workers_on_one_gpu_need_gloo(tmp_path: Path) -> None:
    shared = [Answer(1, [FIRST]), Answer(1, [FIRST])]
    config = request(tmp_path, gpus=1, world_size=2, backend="gloo").config
    assert torchrun._gpus(shared, config) == ("0",)
    with pytest.raises(ConfigError, match="use backend=gloo"):
        torchrun._gpus(shared, dataclasses.replace(config, backend="nccl"))


def test_a_worker_whose_log_cannot_be_written_prints_here(tmp_path: Path, capfd: Capture) -> None:
    (tmp_path / "file").touch()
    with torchrun._logged(RunPaths(tmp_path / "file"), 0, 1):
        os.write(1, b"trains\n")
    assert capfd.readouterr().out == "trains\n"
