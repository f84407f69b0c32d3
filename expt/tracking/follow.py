"""The process that sends while runs are under way: `python -m expt.tracking.follow TRACKER FOLDER`.

It reads run folders, and tells its command by lines on stdout. The command tells it that all runs
have ended by closing stdin, after the seconds that are left. It ends with the command, however that
ends."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from pathlib import Path

from expt.errors import warn
from expt.tracking.sender import Sender, runs_in, settled
from expt.tracking.tracker import in_a_line

NICENESS = 10
"""Workers come first."""
POLL_S = 1.0
MAX_WAIT_S = 60.0
"""Between two tries, where the dashboard cannot be reached."""
END_S = 10.0
"""What it has for the rest where the command was killed, and could not say so."""
LEFT, AT = "left: ", "at: "
"""What it tells at its end: why not all could be sent; where a person sees what was sent."""


class Command:
    """The command that it works for."""

    def __init__(self) -> None:
        self.has_ended = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        words = sys.stdin.read()
        patience_s = float(words) if words.strip() else END_S
        self.has_ended.set()
        time.sleep(
            patience_s
        )  # the other thread ends this process, or waits for a server that does not answer
        with contextlib.suppress(OSError):
            os.write(1, f"{LEFT}no answer in {patience_s:g} s\n".encode())
        os._exit(1)


def main(name: str, folder: Path) -> None:
    """Send until the command ends, and then what is left."""
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    command, sender = Command(), Sender(name, live=True)
    _preload(name)
    failures = 0
    while not command.has_ended.wait(min(POLL_S * 2**failures, MAX_WAIT_S)):
        if sender.send(runs_in(folder)):
            failures = 0
        else:
            failures = min(failures + 1, 10)
            if failures == 1:
                warn(
                    f"{name}: {_why(sender)}; nothing is lost: runs train on, and it is tried again"
                )
    settled(runs_in(folder), 3.0)
    sent = sender.send(runs_in(folder), last=True)
    if sent:
        try:
            sender.end()
        except Exception as error:
            sender.error, sent = error, False
    for address in sender.addresses:
        print(f"{AT}{address}")
    if not sent:
        print(f"{LEFT}{_why(sender)}")
    sys.stdout.flush()


def _preload(name: str) -> None:
    """Its import takes seconds, in which no run has come to a number yet."""
    with contextlib.suppress(ImportError):
        __import__(name)


def _why(sender: Sender) -> str:
    where = f"{sender.where}: " if sender.where else ""
    return f"{where}{in_a_line(sender.error)}" if sender.error else where


if __name__ == "__main__":
    sys.stderr = sys.stdout  # for warnings; what libraries print there is dropped by who reads it
    main(sys.argv[1], Path(sys.argv[2]))
    os._exit(0)  # no atexit hook of a library is waited for
