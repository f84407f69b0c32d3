"""A page followed to the letter: its files written, its commands typed into one shell, in an empty
folder.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.documents.comparison import difference
from scripts.documents.pages import Command, File, steps

ROOT = Path(__file__).parents[2]
PRINTED_WITH = ("2.15", "AVX512", "AuthenticAMD")
"""torch, instructions and processor that the pages' numbers are from; another may add up in another
order.
"""


@dataclass(frozen=True)
class Answer:
    """What came of a command."""

    command: Command
    printed: tuple[str, ...]
    code: int

    def wrong(self, *, exact: bool = True) -> str | None:
        """What is other than the page says; None where nothing is."""
        shown = self.command.shown
        fails = any(line.startswith("error: ") for line in shown)
        if (self.code != 0) != fails:
            return f"exit code {self.code}\n" + "\n".join(self.printed)
        return difference(shown, self.printed, exact=exact) if shown else None


def follow(
    text: str,
    folder: Path,
    env: Mapping[str, str],
    *,
    install: bool = False,
    timeout_s: float = 900,
) -> list[Answer]:
    """Do in `folder` what a page says, one shell for all of it; `install` also what installs
    packages.
    """
    found = [step for step in steps(text) if isinstance(step, File) or _runs(step, install)]
    if "scripts/" in text and not (folder / "scripts").exists():  # of the checkout
        (folder / "scripts").symlink_to(Path(env.get("PYTHONPATH", ROOT)) / "scripts")
    script = "\n".join(_as_shell(step, index) for index, step in enumerate(found))
    words = ["bash", "--norc", "-c", script]
    with subprocess.Popen(words, cwd=folder, env=dict(env), text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, start_new_session=True) as shell:  # fmt: skip
        try:
            printed, _ = shell.communicate(timeout=timeout_s)
        except BaseException:
            os.killpg(shell.pid, signal.SIGKILL)
            raise
    return list(_answers(printed.replace(str(folder), "/home/me"), found))


def _runs(command: Command, install: bool) -> bool:
    return command.not_run is None and (install or not command.installs)


def _as_shell(step: File | Command, index: int) -> str:
    if isinstance(step, File):
        name = shlex.quote(step.name)
        return (
            f"mkdir -p \"$(dirname {name})\"\ncat > {name} <<'END OF FILE'\n{step.text}END OF FILE"
        )
    return f"{step.words}\nprintf '\\036%d %d\\036' {index} $?"


def _answers(printed: str, found: Sequence[File | Command]) -> Iterable[Answer]:
    parts = printed.split("\036")
    for text, told in zip(parts[::2], parts[1::2], strict=False):
        index, code = map(int, told.split())
        command = found[index]
        assert isinstance(command, Command)
        yield Answer(command, tuple(line.rstrip() for line in text.rstrip("\n").splitlines()), code)


def environment(home: Path, root: Path = ROOT) -> dict[str, str]:
    """That of a terminal of a person new to the machine, in which `python` finds expt in `root`."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    own = {
        "HOME": str(home),
        "PATH": path,
        "PYTHONPATH": str(root),
        "COLUMNS": "100",
        "CUDA_VISIBLE_DEVICES": "",
    }
    return {**os.environ, **own}


def printed_here() -> bool:
    """Whether this machine adds up as the one did that the pages' numbers are from."""
    import torch

    torch_version, instructions, vendor = PRINTED_WITH
    processor = Path("/proc/cpuinfo").read_text()
    same = (
        torch.__version__.startswith(torch_version)
        and torch.backends.cpu.get_cpu_capability() == instructions
    )
    return same and vendor in processor


def with_answers(text: str, answers: Sequence[Answer]) -> str:
    """The page with what was printed now, as long as what it showed: `...` stays where it stood."""
    for answer in sorted(answers, key=lambda answer: answer.command.span, reverse=True):
        shown = answer.command.shown
        if shown:
            begins, ends = answer.command.span
            text = (
                text[:begins]
                + "".join(f"{line}\n" for line in _shortened(shown, answer.printed))
                + text[ends:]
            )
    return text


def _shortened(shown: Sequence[str], printed: Sequence[str]) -> Sequence[str]:
    if "..." not in shown:
        return printed
    if shown.count("...") > 1:
        return shown
    before, after = shown.index("..."), list(reversed(shown)).index("...")
    return [*printed[:before], "...", *(printed[len(printed) - after :])]
