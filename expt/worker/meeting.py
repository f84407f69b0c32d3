"""Where the workers of one machine find one another: the port that the driver holds for them."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch.distributed as dist


class Meeting(NamedTuple):
    """Where a run's workers find one another."""

    port: int
    listener: socket.socket | None
    """The socket that holds the port, for the one worker who serves it."""


def connect(meeting: Meeting, timeout_s: float) -> dist.Store:
    """The store at which the workers meet; the one who was given the listener serves it."""
    import torch.distributed as dist  # late: the driver passes a Meeting on, and has no torch

    serves = meeting.listener is not None
    # Given an address alone, TCPStore would listen on all of them.
    fd = meeting.listener.detach() if meeting.listener else None
    return dist.TCPStore(
        "127.0.0.1",
        meeting.port,
        is_master=serves,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=fd,
    )
