"""Where the workers that torchrun or Slurm has started meet, before they have a process group: a
store they all know.

Rank 0 decides and the others hear it. A store may outlive a round of workers (torchrun starts them
again beside it), so whatever a round says stands under a name of its own, and a worker believes
only what answers its own hello."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import socket
import struct
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from expt.errors import RunFailed, first_line
from expt.runs.result import Host

ARRIVE_S = 300.0
"""How long workers wait for each other to say hello; torch's own default."""
QUIET_S = 5.0
"""How long rank 0 waits before it says for whom."""
ROUND, EARLIER = "expt/round", "expt/earlier"


@dataclass(frozen=True)
class Arrival:
    """A worker as it introduces itself."""

    rank: int
    host: str
    node: int
    token: str


class Rendezvous:
    """This worker's place in the present round."""

    def __init__(
        self, store: dist.Store, *, rank: int, world_size: int, arrive_s: float = ARRIVE_S
    ) -> None:
        self._store, self._rank, self._world_size, self._arrive_s = (
            store,
            rank,
            world_size,
            arrive_s,
        )
        self._round = ""
        if rank == 0:
            self._round = uuid.uuid4().hex
            store.set(ROUND, self._round)

    def earlier(self) -> str | None:
        """The run folder of an earlier round of the same job, where the store has outlived it."""
        return self._store.get(EARLIER).decode() if self._store.check([EARLIER]) else None

    def gather(self) -> list[Arrival]:
        """Rank 0: every worker, by rank, once all have arrived.

        Raises RunFailed, naming those that have not.
        """
        others = {rank: self._key(f"hello/{rank}") for rank in range(1, self._world_size)}
        quiet_s = min(QUIET_S, self._arrive_s)
        if missing := self._missing(others, quiet_s):
            print(f"waiting for {missing}, for {self._arrive_s:g} s at most", flush=True)
            if missing := self._missing(
                others, max(self._arrive_s - quiet_s, 0.001)
            ):  # 0 would be for ever
                raise RunFailed(f"{missing} did not arrive within {self._arrive_s:g} s")
        hellos = [Arrival(**json.loads(self._store.get(key))) for key in others.values()]
        return [_arrival(0, ""), *hellos]

    def _missing(self, others: Mapping[int, str], within_s: float) -> str:
        """Who has not said hello, each by its key, `within_s` from now; empty where all have."""
        with contextlib.suppress(dist.DistStoreError, dist.DistNetworkError):
            self._store.wait(list(others.values()), timedelta(seconds=within_s))
        missing = [rank for rank, key in others.items() if not self._store.check([key])]
        who = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        return f"rank {who} of {self._world_size}" if missing else ""

    def tell(self, arrivals: list[Arrival], content: Mapping[str, Any]) -> None:
        """Rank 0: let the workers that have arrived hear `content`, which is JSON; `listen` returns
        it.
        """
        if "folder" in content:
            self._store.set(EARLIER, content["folder"])
        tokens = [arrival.token for arrival in arrivals]
        self._store.set(self._key("told"), json.dumps({**content, "tokens": tokens}))

    def listen(self) -> dict[str, Any]:
        """What rank 0 tells this round. Raises RunFailed if it does not arrive."""
        token, pause_s, end = uuid.uuid4().hex, 0.01, time.monotonic() + self._arrive_s
        while time.monotonic() < end:
            current = self._store.get(ROUND).decode() if self._store.check([ROUND]) else ""
            if current and current != self._round:
                self._round = current
                hello = _arrival(self._rank, token)
                self._store.set(self._key(f"hello/{self._rank}"), json.dumps(vars(hello)))
            if current and self._store.check([self._key("told")]):
                told: dict[str, Any] = json.loads(self._store.get(self._key("told")))
                if (
                    token in told["tokens"]
                ):  # else it is the word of an earlier round, whose rank 0 is gone
                    return told
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.25)
        raise RunFailed(f"rank 0 of {self._world_size} did not arrive within {self._arrive_s:g} s")

    def group_store(self) -> dist.Store:
        """Where this round's process group keeps its addresses, apart from those of the dead."""
        return dist.PrefixStore(f"expt/{self._round}", self._store)

    def _key(self, name: str) -> str:
        return f"expt/{self._round}/{name}"


def _arrival(rank: int, token: str) -> Arrival:
    return Arrival(rank, socket.gethostname(), int(os.environ.get("GROUP_RANK", "0")), token)


def hosts(arrivals: list[Arrival]) -> list[Host]:
    """Each node's host name and its workers' ranks, as result.json says it."""
    nodes: dict[tuple[int, str], list[int]] = {}
    for arrival in sorted(arrivals, key=lambda arrival: arrival.rank):
        nodes.setdefault((arrival.node, arrival.host), []).append(arrival.rank)
    return [{"name": host, "ranks": ranks} for (_, host), ranks in nodes.items()]


@functools.cache
def of_environment() -> Rendezvous:
    """The meeting at MASTER_ADDR and MASTER_PORT. Raises RunFailed where nothing answers."""
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if os.environ["LOCAL_WORLD_SIZE"] != os.environ["WORLD_SIZE"]:
        _let_gloo_reach(address)
    else:
        os.environ.setdefault(
            "NCCL_SOCKET_IFNAME", "lo"
        )  # all are here: nobody else is to reach them
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=ARRIVE_S)))
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        where = f"MASTER_ADDR={address} MASTER_PORT={port}"
        raise RunFailed(f"{where}: cannot be reached from here: {first_line(error)}") from None
    return Rendezvous(store, rank=rank, world_size=world_size)


def _let_gloo_reach(address: str) -> None:
    """Name the interface that leads to rank 0: gloo takes what the host name resolves to, often the
    loopback.
    """
    interface = interface_towards(address)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def interface_towards(address: str) -> str | None:
    """The network interface by which this machine reaches `address`; None where it has no name
    here.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # no packet leaves
            own = probe.getsockname()[0]
            for _, name in socket.if_nameindex():
                if _address_of(probe, name) == own:
                    return name
    except OSError:
        pass
    return None


def _address_of(probe: socket.socket, interface: str) -> str | None:
    try:
        answer = fcntl.ioctl(
            probe.fileno(), 0x8915, struct.pack("256s", interface.encode()[:15])
        )  # SIOCGIFADDR
    except OSError:  # it has no address
        return None
    return socket.inet_ntoa(answer[20:24])
