"""The error that ends a worker, as it leaves it for the driver, and the text of a failed run."""

from __future__ import annotations

import json
import re
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from expt.config.secrets import hidden
from expt.errors import MISTAKES, ConfigError, ExptError

LOG = "log: "
RAISED = " raised\n\n"
"""The text of an error between the rank that raised and its traceback."""
NOTE = "of model="
"""The beginning of a line after the exception that lists the arguments of classes."""
FAULT = "GPU "
"""The beginning of a further line for each GPU that can't be used, of a run that lacks GPUs."""
LOST = (
    *("Connection closed by peer", "Connection reset by peer", "Timed out waiting", "Broken pipe"),
    *("timed out after", "communicator was aborted", "remote process exit", "ncclRemoteError"),
)
"""Texts in errors of collectives of gloo, NCCL or torch's store if another worker is gone."""


def write_error(path: Path, error: BaseException) -> None:
    """Write the exception that ends a worker, in the form that torch elastic reads."""
    raised = Raised(
        text=hidden(str(error)),
        traceback=hidden("".join(traceback.format_exception(error))),
        expected=isinstance(error, ExptError),
        is_refusal=isinstance(error, ConfigError),
        kind=type(error).__name__,
        progress=getattr(error, "progress", None),
        gpus=getattr(error, "gpus", {}),
    )
    about = {"py_callstack": raised.traceback, "timestamp": str(int(time.time()))}
    message = {"message": f"{raised.kind}: {raised.text}", "extraInfo": about}
    content = {"message": message, "raised": raised._asdict()}
    path.write_text(json.dumps(hidden(content)), encoding="utf-8")


class Raised(NamedTuple):
    """The content of a worker's error.json."""

    text: str
    traceback: str
    expected: bool
    """True if `text` is meant for a person, without the traceback."""
    is_refusal: bool
    """True if bad input ended it, which no other worker's end does."""
    kind: str
    """The name of the exception's class."""
    progress: Sequence[int] | None = None
    """The step that it had reached, if it has ended itself because it was stuck."""
    gpus: Mapping[str, str] = {}
    """The faults of GPUs that may be to blame, by name; see RunFailed."""
    time_ns: int = 0
    """The time at which it was written."""

    @property
    def has_lost_others(self) -> bool:
        """True if it ended because another had."""
        return not self.expected and any(text in self.text for text in LOST)


def read_error(path: Path) -> Raised | None:
    """Return the exception that ended a worker; None if it left none, or only part of one."""
    try:
        raised = Raised(**json.loads(path.read_text(encoding="utf-8"))["raised"])
        return raised._replace(time_ns=path.stat().st_mtime_ns)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def mistake_in(error: str) -> str:
    """Return the traceback of a mistake in code; "" where another attempt may succeed."""
    traceback_only = error.partition(RAISED)[2].rpartition(f"\n\n{LOG}")[0]
    return traceback_only if _cause(traceback_only).partition(":")[0] in MISTAKES else ""


def faults_in(error: str) -> list[str]:
    """Return the lines on GPUs that can't be used, which many runs of a sweep may share."""
    return [line for line in error.splitlines()[1:] if line.startswith(FAULT)]


def in_one_line(error: str, *, with_log: bool = True) -> str:
    """Return the text of a run's error in one line: the problem, its cause, and the log."""
    first, _, rest = error.strip().partition("\n")
    cause = _cause(rest)
    log = next((f"  ({line})" for line in rest.splitlines() if line.startswith(LOG)), "")
    return f"{first}{': ' + cause if cause else ''}{log * with_log}"


def alike(error: str) -> str:
    """Return the text of an error, equal for all runs that fail by one cause.

    It lacks every number but those of settings: ranks, steps, addresses, bytes.
    """
    return re.sub(r"(?<![=\[,\w.-])\d[\w.]*", "#", in_one_line(error, with_log=False))


def _cause(text: str) -> str:
    """Return the line of a traceback that names the exception's class; else the last line.

    Torch adds lines of help to errors of CUDA. A list of problems follows its own head.
    """
    _, frame, after = text.rpartition('\n  File "')
    lines = [
        line for line in after.splitlines() if line and not line.startswith((LOG, NOTE, FAULT))
    ]
    if frame:
        return next((line for line in lines[1:] if not line.startswith(" ")), "")
    return lines[-1].strip() if lines else ""
