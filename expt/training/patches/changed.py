"""What is said where the installed torch is not the one that a patch knows."""

from __future__ import annotations

import functools
import sys

import torch


@functools.cache  # once in a process
def warn_changed(what: str, how: str, mend: str = "") -> None:
    """Tell, in this worker's log, that `what` is left out for torch's own way, and why."""
    text = f"warning: torch {torch.__version__} has changed ({how}); {what} is left out"
    print(f"{text}; {mend}" if mend else text, file=sys.stderr, flush=True)
