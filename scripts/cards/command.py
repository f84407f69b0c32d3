"""Try expt on this machine's first GPU, and print rows for BENCHMARKS.md as they come.

Each part runs in processes of its own and ends by its limit; together they take up to ten minutes.
`scripts/soft_gpu scripts/first_card` tries the script itself, on soft GPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from expt.gpus import visible
from scripts.benchmarks.memory import children, tree_below
from scripts.benchmarks.systems import environment
from scripts.cards.parts import PARTS, Row
from tests import soft_gpu

SOFTWARE = "soft GPU"
LEAST_S = 15
"""With less time left no part is begun."""
ENDED, FAILED = "not ended after {:.0f} s", "failed"
Say = Callable[[str], None]


def main() -> None:
    """Measure what the arguments ask for; exit with 2 if there is no card, with 1 if a part failed.

    Every line is written at once: whoever ends this has what was measured so far.
    """
    args = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that its part ends, too
    if not visible().gpus:
        print("error: torch sees no GPU here; scripts/soft_gpu gives soft ones", file=sys.stderr)
        sys.exit(2)
    is_software = soft_gpu.is_preloaded(os.environ)
    logs = args.logs or Path(tempfile.mkdtemp(prefix="expt-first-card-"))
    logs.mkdir(parents=True, exist_ok=True)
    say: Say = lambda line: print(line, flush=True)  # noqa: E731
    if is_software:
        say(f"These are {SOFTWARE}s (tests/soft_gpu): no figure below is that of a card.\n")
    say("| part | case | expt | to compare |\n|---|---|---|---|")
    table = Table(say, SOFTWARE if is_software else "")
    end, failed = time.monotonic() + args.seconds, False
    with tempfile.TemporaryDirectory(prefix="expt-first-card-") as scratch:
        for name in args.only:
            if is_software and not PARTS[name].on_software:
                table.add(name, Row("", "not begun: soft GPUs can't show it"))
                continue
            left = end - time.monotonic()
            if left < LEAST_S:
                table.add(name, Row("", "not begun: no time is left"))
                failed = True
                continue
            words = [name, f"--scratch={scratch}", *["--small"] * (args.small or is_software)]
            command = [sys.executable, "-m", "scripts.cards.parts", *words]
            limit_s = min(PARTS[name].limit_s * (4 if is_software else 1), left)
            failed |= not run_part(command, name, table, limit_s=limit_s, log=logs / f"{name}.log")
    say(f"\nlogs: {logs}")
    sys.exit(failed)


class Table:
    """Rows of Markdown, each printed once it is known; `mark` stands in the first column of all."""

    def __init__(self, say: Say, mark: str) -> None:
        self._say, self._mark = say, mark

    def add(self, part: str, row: Row) -> None:
        """Print a row."""
        cells = (": ".join(filter(None, (self._mark, part))), *row)
        self._say("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")


def run_part(command: Sequence[str], name: str, table: Table, *, limit_s: float, log: Path) -> bool:
    """Run a part to its end or for `limit_s`; return whether it ended well.

    It prints its rows as JSON. What it says otherwise goes to `log`, whose last line is shown if it
    fails. No process that it has started is left.
    """
    late = threading.Event()

    def end() -> None:
        late.set()
        kill_tree(process.pid)

    with (
        open(log, "wb") as errors,
        subprocess.Popen(
            command, env=environment(PYTHONUNBUFFERED="1"), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True,
        ) as process,
    ):  # fmt: skip
        timer = threading.Timer(limit_s, end)
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                table.add(name, Row(*json.loads(line)))
        finally:
            timer.cancel()
            kill_tree(process.pid)
    if process.returncode == 0:
        return True
    said = log.read_text(errors="replace").strip().splitlines()
    what = ENDED.format(limit_s) if late.is_set() else FAILED
    table.add(name, Row("", what, said[-1][:200] if said else ""))
    return False


def kill_tree(pid: int) -> None:
    """Kill a process and all below it, also those in sessions of their own."""
    for each in tree_below(pid, children()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/first_card", description=__doc__)
    known = ", ".join(f"{name} ({part.limit_s} s)" for name, part in PARTS.items())
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        default=list(PARTS),
        help=f"parts, separated by commas, of: {known}, each with its limit",
    )
    parser.add_argument(
        "--seconds", type=float, default=570, help="limit of all parts together [570]"
    )
    parser.add_argument("--small", action="store_true", help="small sizes, as on soft GPUs")
    parser.add_argument(
        "--logs",
        type=Path,
        metavar="FOLDER",
        help="for the parts' output; a temporary folder without it",
    )
    args = parser.parse_args()
    if unknown := [name for name in args.only if name not in PARTS]:
        parser.error(f"--only {','.join(unknown)}: not one of {', '.join(PARTS)}")
    return args
