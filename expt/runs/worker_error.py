"""error.json: the exception that ended a worker, and its text in one line."""

from __future__ import annotations

import json
import time
import traceback
from pathlib import Path
from typing import NamedTuple

from expt.config.secrets import hidden
from expt.errors import MISTAKES, ConfigError, ExptError

LOG = "log: "
RAISED = " raised\n\n"
"""Between the rank that raised and its traceback, in the text of a run's error."""
LOST = (
    *("Connection closed by peer", "Connection reset by peer", "Timed out waiting", "Broken pipe"),
    *("timed out after", "communicator was aborted", "remote process exit", "ncclRemoteError"),
)
"""Texts of what a collective of gloo, NCCL or torch's store raises if another worker is gone."""


def write_error(path: Path, error: BaseException, exit_code: int) -> None:
    """Write the exception that ends a worker, in the form that torch elastic reads."""
    content = {
        "message": {
            "message": f"{type(error).__name__}: {error}",
            "extraInfo": {
                "py_callstack": "".join(traceback.format_exception(error)),
                "timestamp": str(int(time.time())),
            },
        },
        "text": str(error),
        "expected": isinstance(error, ExptError),
        "kind": type(error).__name__,
        "exit_code": exit_code,
        "beats": getattr(error, "beats", None),
    }
    path.write_text(json.dumps(hidden(content)), encoding="utf-8")


class Raised(NamedTuple):
    """The content of a worker's error.json."""

    text: str
    traceback: str
    exit_code: int
    time_ns: int
    expected: bool
    """Whether `text` is meant for a person, without the traceback."""
    kind: str
    """The name of its class."""
    beats: int | None = None
    """How far it had come, if it has ended itself because it was stuck."""

    @property
    def is_refusal(self) -> bool:
        """Whether bad input ended it, which no other worker's end does."""
        return self.expected and self.exit_code == ConfigError.exit_code

    @property
    def has_lost_others(self) -> bool:
        """Whether it ended because another had."""
        return not self.expected and any(text in self.text for text in LOST)


def read_error(path: Path) -> Raised | None:
    """Return the exception that ended a worker; None if it left none, or only part of one."""
    try:
        content, time_ns = json.loads(path.read_text(encoding="utf-8")), path.stat().st_mtime_ns
        callstack = content["message"]["extraInfo"]["py_callstack"]
        return Raised(
            content.get("text", ""),
            callstack,
            content.get("exit_code", 1),
            time_ns,
            content.get("expected", False),
            content.get("kind", ""),
            content.get("beats"),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def mistake_in(error: str) -> str:
    """Return the traceback of a mistake in code; "" where another attempt may succeed."""
    traceback_alone = error.partition(RAISED)[2].rpartition(f"\n\n{LOG}")[0]
    name = traceback_alone.rpartition("\n")[2].partition(":")[0]
    return traceback_alone if name in MISTAKES else ""


def in_one_line(error: str, *, with_log: bool = True) -> str:
    """Return the text of a run's error: what went wrong, its cause, and where the log is."""
    first, *rest = error.strip().splitlines() or [""]
    # A traceback's last line is the exception; its log path comes after. A list of problems follows
    # its own head.
    cause = next((line.strip() for line in reversed(rest) if line and not line.startswith(LOG)), "")
    log = next((f"  ({line})" for line in rest if line.startswith(LOG)), "") if with_log else ""
    return f"{first}{': ' + cause if cause else ''}{log}"
