"""Ranks of a process group on soft GPUs, as torchrun would start them."""

import socket
import subprocess
from pathlib import Path

from tests.facade import ended, environment
from tests.warm import Command


def ranks(program: str, size: int, folder: Path) -> list[subprocess.CompletedProcess[str]]:
    """Run `python -c PROGRAM` as each of `size` ranks, after `cards`; all must end well."""
    shared = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        shared["MASTER_PORT"] = str(listener.getsockname()[1])
    started = [
        Command((), folder, environment(**shared, RANK=rank, LOCAL_RANK=rank), program)
        for rank in map(str, range(size))
    ]
    done = [ended(rank) for rank in started]
    assert [each.returncode for each in done] == [0] * size, done[0].stderr
    return done
